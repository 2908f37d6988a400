// One Hopper kernel for the three BF16 products of a linear layer, dense and over groups.
//
//   forward          y[i, n]    = sum_k a[i, k] b[g, n, k]      a and b K-major
//   input gradient   dx[i, k]   = sum_n g[i, n] w[g, n, k]      b MN-major
//   weight gradient  dw[g,n,k]  = sum_i g[i, n] x[i, k]         both MN-major, a ragged depth
//
// A block is one warpgroup that feeds and two that multiply, and stays on its multiprocessor. The
// copy engine fills a ring of shared-memory stages of depth 64; each multiplying warpgroup owns 64
// rows of the 128-row tile and all of its columns, in registers. An element is one chain of
// tensor-core steps of 16 along the depth, in order, so a row's bits depend on neither the tile nor
// the other rows.
//
// The rows of all groups are one matrix, so one tensor map serves every group: a tile that reaches
// past its group's end reads rows of the next one, which touch only rows that are not stored. The
// second warpgroup rests where a tile has at most 64 rows: a group's last tile costs what it holds.
// In the weight gradient the depth is what is ragged: the last stage's rows past the group's end are
// cleared in shared memory (they may hold NaN), up to the next step of 16, and later steps are left
// out.
//
// Two blocks of a cluster may share a tile of a (neighbours along the columns) or of b (along the
// rows): each loads half of it for both.
#ifndef JAXFP4_CUDA_SM90_BF16_GEMM_CUH_
#define JAXFP4_CUDA_SM90_BF16_GEMM_CUH_

#include <cuda_bf16.h>

#include "cute/arch/cluster_sm90.hpp"
#include "ffi/cuda/sm90_wgmma.cuh"
#include "ffi/cuda/tile_schedule.cuh"

namespace jaxfp4::cuda::sm90 {

constexpr int kTileRows = 128;
constexpr int kTileDepth = 64;
constexpr int kGroupRows = 64;  // of a tile, for each multiplying warpgroup
constexpr int kThreads = 384;
constexpr int kMultiplyingWarps = 8;

enum class Share { kNothing, kA, kB };

// Where the results go and what they are multiplied by.
struct GemmParams {
  void* y;
  const float* a_scale;  // null, or at row * a_scale_stride
  int64_t a_scale_stride;
  const float* b_scale;  // null, or at group * b_scale_group_stride (+ column, if by column)
  int64_t b_scale_group_stride;
  bool b_scale_by_column;
  const int32_t* group_sizes;
  int groups;
  int64_t rows;       // of all groups
  int64_t tile_rows;  // weight gradient: rows of one group's y. Otherwise a group's own size
  int64_t depth;      // otherwise; the weight gradient's is a group's own size
  int64_t columns;
  int column_tiles;  // counted in pairs where two blocks share a
};

template <int kColumns>
constexpr int kStages = kColumns == 256 ? 4 : kColumns == 192 ? 5 : 6;

template <int kColumns>
struct Stage {
  alignas(1024) uint8_t a[kTileRows / 64][kBoxBytes];
  alignas(1024) uint8_t b[kColumns / 64][kBoxBytes];
};

template <int kColumns>
struct SharedMemory {
  Stage<kColumns> stages[kStages<kColumns>];
  uint64_t full[kStages<kColumns>];
  uint64_t empty[kStages<kColumns>];
};

// A position in the ring of stages, with the phase of its barriers.
template <int kCount>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void Advance() {
    if (++stage == kCount) {
      stage = 0;
      phase ^= 1;
    }
  }
};

using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;

// Four threads of a quad hold, for each of four 8-column pieces of a row, two columns each; after
// this each holds one piece whole.
__device__ inline void TransposeQuad(uint32_t (&value)[4]) {
  const int t = threadIdx.x % 4;
  // Exchange pieces with the thread two away, then with the one next to this.
  const bool high = (t & 2) != 0;
  uint32_t send0 = high ? value[0] : value[2], send1 = high ? value[1] : value[3];
  send0 = __shfl_xor_sync(0xFFFFFFFFu, send0, 2);
  send1 = __shfl_xor_sync(0xFFFFFFFFu, send1, 2);
  uint32_t low0 = high ? send0 : value[0], low1 = high ? send1 : value[1];
  uint32_t up0 = high ? value[2] : send0, up1 = high ? value[3] : send1;
  // low: from threads 0 and 1 (t & 1), up: from threads 2 and 3; pieces 2 * (t >> 1) and one more.
  const bool odd = (t & 1) != 0;
  uint32_t low_send = odd ? low0 : low1, up_send = odd ? up0 : up1;
  low_send = __shfl_xor_sync(0xFFFFFFFFu, low_send, 1);
  up_send = __shfl_xor_sync(0xFFFFFFFFu, up_send, 1);
  value[0] = odd ? low_send : low0;
  value[1] = odd ? low1 : low_send;
  value[2] = odd ? up_send : up0;
  value[3] = odd ? up1 : up_send;
}

__device__ inline uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// What the sums of a row are multiplied by before they are rounded: first the operand b's scale, one
// for the tile or one a column, then the row's.
struct RowFactors {
  float row;
  float group;
  const float* column;  // null: group's for all

  __device__ float2 Apply(float sum0, float sum1, int64_t c) const {
    const float2 b = column == nullptr ? make_float2(group, group)
                                       : __ldg(reinterpret_cast<const float2*>(column + c));
    return make_float2(__fmul_rn(__fmul_rn(sum0, b.x), row), __fmul_rn(__fmul_rn(sum1, b.y), row));
  }
};

// Stores one of this thread's two rows of the warpgroup's sums; `row` is null for a row that is not
// the group's. All threads of a quad, who share their rows, call.
template <int kColumns, int kHalf>
__device__ inline void StoreRow(float (&sum)[kColumns / 2], const RowFactors& factors,
                                __nv_bfloat16* row, int64_t columns) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int piece = 0; piece < kColumns / 8; piece += 4) {
    if (piece * 8 >= columns) break;
    uint32_t packed[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int64_t column = (piece + p) * 8 + t * 2;
      const int i = (piece + p) * 4 + kHalf * 2;
      const float2 scaled = factors.Apply(sum[i], sum[i + 1], column < columns ? column : 0);
      packed[p] = PackBf16(scaled.x, scaled.y);
    }
    TransposeQuad(packed);
    const int64_t column = (piece + t) * 8;
    if (row != nullptr && column < columns) {
      *reinterpret_cast<uint4*>(row + column) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

template <int kColumns, int kHalf>
__device__ inline void StoreRow(float (&sum)[kColumns / 2], const RowFactors& factors, float* row,
                                int64_t columns) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int piece = 0; piece < kColumns / 8; ++piece) {
    const int64_t column = piece * 8 + t * 2;
    if (row == nullptr || column >= columns) continue;
    const int i = piece * 4 + kHalf * 2;
    *reinterpret_cast<float2*>(row + column) = factors.Apply(sum[i], sum[i + 1], column);
  }
}

template <int kColumns, Major kMajorA, Major kMajorB, Share kShare, bool kRaggedDepth, class Y>
class GemmKernel {
 public:
  static constexpr int kCluster = kShare == Share::kNothing ? 1 : 2;
  static constexpr int kBoxesB = kColumns / 64;
  static constexpr int kStageCount = kStages<kColumns>;
  using Memory = SharedMemory<kColumns>;
  using Position = RingPosition<kStageCount>;

  __device__ GemmKernel(Memory& memory, const GemmParams& params)
      : memory_(memory),
        params_(params),
        rank_(kCluster == 1 ? 0 : blockIdx.x % kCluster),
        schedule_(params.group_sizes, params.groups, params.rows,
                  kTileRows * (kShare == Share::kB ? 2 : 1),
                  kRaggedDepth ? static_cast<int>((params.tile_rows + kRowsOfTile - 1) / kRowsOfTile)
                               : 0,
                  params.column_tiles) {}

  __device__ void InitializeBarriers() {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStageCount; ++s) {
        ClusterBarrier::init(&memory_.full[s], 1);
        ClusterBarrier::init(&memory_.empty[s], kMultiplyingWarps * kCluster);
      }
      cutlass::arch::fence_barrier_init();
    }
    SynchronizeCluster();
  }

  __device__ void SynchronizeCluster() {
    if constexpr (kCluster == 1) {
      __syncthreads();
    } else {
      cute::cluster_sync();
    }
  }

  // The feeding warp: every stage of every tile, in order.
  __device__ void Feed(const CUtensorMap* map_a, const CUtensorMap* map_b) {
    const bool leader = threadIdx.x % 32 == 0;
    Position position;
    Tile tile;
    for (int64_t number = blockIdx.x / kCluster; FindTile(number, tile);
         number += gridDim.x / kCluster) {
      const bool both = tile.rows > kGroupRows;
      for (int64_t block = 0; block < tile.depth_blocks; ++block) {
        if (leader) {
          ClusterBarrier::wait(&memory_.empty[position.stage], position.phase ^ 1);
          FillStage(map_a, map_b, tile, block * kTileDepth, both, position.stage);
        }
        position.Advance();
      }
      __syncwarp();
    }
  }

  // A multiplying warpgroup (0 or 1).
  __device__ void Multiply(int warpgroup) {
    float sum[kColumns / 2];
    Position position;
    Tile tile;
    for (int64_t number = blockIdx.x / kCluster; FindTile(number, tile);
         number += gridDim.x / kCluster) {
      const bool active = tile.rows > warpgroup * kGroupRows;
      if (tile.depth_blocks == 0) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) sum[i] = 0.0f;
      }
      MultiplyTile(tile, warpgroup, active, position, sum);
      if (active) StoreTile(tile, warpgroup, sum);
    }
    if constexpr (!kRaggedDepth) ZeroUnusedRows();
  }

 private:
  // Tile rows that one number stands for.
  static constexpr int kRowsOfTile = kTileRows * (kShare == Share::kB ? 2 : 1);

  struct Tile {
    int group;
    int64_t row;           // of a, and of y but in the weight gradient
    int64_t rows;          // from `row` to the end of the group, at most 128; may be negative
    int64_t column;        // of b and y
    int64_t depth_begin;   // in the ragged depth
    int64_t depth;         // of the whole product
    int64_t depth_blocks;  // stages
  };

  __device__ bool FindTile(int64_t number, Tile& tile) {
    OutputTile found;
    if (!schedule_.Find(number, found)) return false;
    tile.group = found.group;
    const int64_t row_in_group = static_cast<int64_t>(found.row_tile) * kRowsOfTile +
                                 (kShare == Share::kB ? rank_ * kTileRows : 0);
    const int64_t group_rows = kRaggedDepth ? params_.tile_rows : found.rows;
    tile.rows = min(static_cast<int64_t>(kTileRows), group_rows - row_in_group);
    tile.row = row_in_group + (kRaggedDepth ? 0 : found.first_row);
    const int column_tile = kShare == Share::kA ? found.column_tile * 2 + rank_ : found.column_tile;
    tile.column = static_cast<int64_t>(column_tile) * kColumns;
    tile.depth_begin = kRaggedDepth ? found.first_row : 0;
    tile.depth = kRaggedDepth ? found.rows : params_.depth;
    tile.depth_blocks = (tile.depth + kTileDepth - 1) / kTileDepth;
    return true;
  }

  __device__ static void LoadBox(const CUtensorMap* map, uint64_t* barrier, bool multicast, void* to,
                                 Major major, int64_t row, int64_t depth, int group) {
    const int32_t inner = static_cast<int32_t>(major == Major::K ? depth : row);
    const int32_t outer = static_cast<int32_t>(major == Major::K ? row : depth);
    constexpr uint64_t kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    if (multicast) {
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(map, barrier, uint16_t{3}, kNormal, to, inner, outer,
                                             group);
    } else {
      cute::SM90_TMA_LOAD_3D::copy(map, barrier, kNormal, to, inner, outer, group);
    }
  }

  __device__ void FillStage(const CUtensorMap* map_a, const CUtensorMap* map_b, const Tile& tile,
                            int64_t depth, bool both, int s) {
    Stage<kColumns>& stage = memory_.stages[s];
    uint64_t* barrier = &memory_.full[s];
    const int boxes_a = both ? 2 : 1;
    ClusterTransactionBarrier::arrive_and_expect_tx(barrier, (boxes_a + kBoxesB) * kBoxBytes);
    for (int i = 0; i < boxes_a; ++i) {
      if (kShare == Share::kA && i != rank_) continue;
      LoadBox(map_a, barrier, kShare == Share::kA, stage.a[i], kMajorA, tile.row + i * 64,
              tile.depth_begin + depth, 0);
    }
#pragma unroll
    for (int i = 0; i < kBoxesB; ++i) {
      if (kShare == Share::kB && i / (kBoxesB / 2) != rank_) continue;
      LoadBox(map_b, barrier, kShare == Share::kB, stage.b[i], kMajorB, tile.column + i * 64,
              tile.depth_begin + depth, kRaggedDepth ? 0 : tile.group);
    }
  }

  __device__ void Release(int s) {
    const int lane = threadIdx.x % 32;
    if constexpr (kCluster == 1) {
      if (lane == 0) ClusterBarrier::arrive(&memory_.empty[s]);
    } else {
      ClusterBarrier::arrive(&memory_.empty[s], lane, lane < kCluster);
    }
  }

  __device__ void MultiplyTile(const Tile& tile, int warpgroup, bool active, Position& position,
                               float (&sum)[kColumns / 2]) {
    int previous = -1;
    for (int64_t block = 0; block < tile.depth_blocks; ++block) {
      Stage<kColumns>& stage = memory_.stages[position.stage];
      ClusterBarrier::wait(&memory_.full[position.stage], position.phase);
      int steps = kTileDepth / 16;
      if constexpr (kRaggedDepth) {
        const int64_t left = tile.depth - block * kTileDepth;
        if (left < kTileDepth) {
          steps = static_cast<int>((left + 15) / 16);
          ClearLines(stage, warpgroup, static_cast<int>(left), steps * 16);
        }
      }
      if (active) {
        switch (steps) {  // 4 but in a ragged depth's last stage
          case 1:
            IssueSteps<1>(stage, warpgroup, block != 0, sum);
            break;
          case 2:
            IssueSteps<2>(stage, warpgroup, block != 0, sum);
            break;
          case 3:
            IssueSteps<3>(stage, warpgroup, block != 0, sum);
            break;
          default:
            IssueSteps<4>(stage, warpgroup, block != 0, sum);
        }
        cute::warpgroup_wait<1>();  // all but this stage's
        if (previous >= 0) Release(previous);
        previous = position.stage;
      } else {
        Release(position.stage);
      }
      position.Advance();
    }
    cute::warpgroup_wait<0>();
    FenceSums(sum);
    if (previous >= 0) Release(previous);
  }

  // Steps of 16 along the depth, in order, as one batch of the tensor cores.
  template <int kSteps>
  __device__ static void IssueSteps(Stage<kColumns>& stage, int warpgroup, bool accumulate,
                                    float (&sum)[kColumns / 2]) {
    const uint64_t a = Descriptor<kMajorA>(SharedAddress(stage.a[warpgroup]));
    const uint64_t b = Descriptor<kMajorB>(SharedAddress(stage.b));
    FenceSums(sum);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Wgmma<kColumns, kMajorA, kMajorB>(a + step * kDepthStep<kMajorA>,
                                        b + step * kDepthStep<kMajorB>, sum,
                                        accumulate || step != 0);
    }
    cute::warpgroup_commit_batch();
    FenceSums(sum);
  }

  // The registers are the tensor cores' from here to the wait: nothing may move across.
  __device__ static void FenceSums(float (&sum)[kColumns / 2]) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(sum[i])::"memory");
  }

  // Zeros in lines [begin, end) of every box of the stage: rows of the depth past the group's end.
  __device__ void ClearLines(Stage<kColumns>& stage, int warpgroup, int begin, int end) {
    constexpr int kPiecesPerLine = 8;  // of 16 bytes
    constexpr int kBoxes = kTileRows / 64 + kBoxesB;
    const int pieces = (end - begin) * kPiecesPerLine;
    const int thread = warpgroup * 128 + threadIdx.x % 128;
    for (int i = thread; i < pieces * kBoxes; i += 2 * 128) {
      const int box = i / pieces;
      uint8_t* lines = box < 2 ? stage.a[box] : stage.b[box - 2];
      reinterpret_cast<uint4*>(lines)[begin * kPiecesPerLine + i % pieces] = make_uint4(0, 0, 0, 0);
    }
    FenceSharedWrites();
    cutlass::arch::NamedBarrier::sync(2 * 128, 0);
  }

  __device__ void StoreTile(const Tile& tile, int warpgroup, float (&sum)[kColumns / 2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int64_t row = warpgroup * kGroupRows + warp * 16 + lane / 4;
    Y* y = static_cast<Y*>(params_.y) + tile.column +
           (kRaggedDepth ? tile.group * params_.tile_rows * params_.columns : 0);
    StoreHalf<0>(tile, row, y, sum);
    StoreHalf<1>(tile, row + 8, y, sum);
  }

  template <int kHalf>
  __device__ void StoreHalf(const Tile& tile, int64_t row, Y* y, float (&sum)[kColumns / 2]) {
    const bool inside = row < tile.rows;
    RowFactors factors = {1.0f, 1.0f, nullptr};
    if constexpr (!kRaggedDepth) {
      if (params_.a_scale != nullptr && inside) {
        factors.row = __ldg(params_.a_scale + (tile.row + row) * params_.a_scale_stride);
      }
      if (params_.b_scale != nullptr) {
        const float* scale = params_.b_scale + tile.group * params_.b_scale_group_stride;
        factors.group = __ldg(scale);
        if (params_.b_scale_by_column) factors.column = scale + tile.column;
      }
    }
    StoreRow<kColumns, kHalf>(sum, factors,
                              inside ? y + (tile.row + row) * params_.columns : nullptr,
                              params_.columns - tile.column);
  }

  // Rows of no group, by all multiplying threads of the grid.
  __device__ void ZeroUnusedRows() {
    const int64_t begin = schedule_.UsedRows() * params_.columns * sizeof(Y) / 16;
    const int64_t end = params_.rows * params_.columns * sizeof(Y) / 16;
    uint4* y = static_cast<uint4*>(params_.y);
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x - 128;
    for (int64_t i = begin + thread; i < end; i += static_cast<int64_t>(gridDim.x) * 256) {
      y[i] = make_uint4(0, 0, 0, 0);
    }
  }

  Memory& memory_;
  const GemmParams& params_;
  const int rank_;
  TileSchedule schedule_;
};

template <int kColumns, Major kMajorA, Major kMajorB, Share kShare, bool kRaggedDepth, class Y>
__global__ __launch_bounds__(kThreads, 1) void GemmGlobal(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
    const __grid_constant__ GemmParams params) {
  extern __shared__ uint8_t shared[];
  auto& memory = *reinterpret_cast<SharedMemory<kColumns>*>(
      (reinterpret_cast<uintptr_t>(shared) + 1023) / 1024 * 1024);
  GemmKernel<kColumns, kMajorA, kMajorB, kShare, kRaggedDepth, Y> kernel(memory, params);
  kernel.InitializeBarriers();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x < 32) kernel.Feed(&map_a, &map_b);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    kernel.Multiply(warpgroup - 1);
  }
  // A block's shared memory outlives its neighbour's copies into it.
  kernel.SynchronizeCluster();
}

}  // namespace jaxfp4::cuda::sm90

#endif  // JAXFP4_CUDA_SM90_BF16_GEMM_CUH_
