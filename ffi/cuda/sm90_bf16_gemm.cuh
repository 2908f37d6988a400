// One Hopper kernel for the three BF16 products of a linear layer, dense and over groups.
//
//   forward          y[i, n]    = sum_k a[i, k] b[g, n, k]      a and b K-major
//   input gradient   dx[i, k]   = sum_n g[i, n] w[g, n, k]      b MN-major
//   weight gradient  dw[g,n,k]  = sum_i g[i, n] x[i, k]         both MN-major, a ragged depth
//
// A tile of the result is up to 256 rows by 128 columns, cut into slabs of 64 rows. A block is one
// warpgroup that feeds and two that multiply, and stays on its multiprocessor: the copy engine
// fills a ring of shared-memory stages of depth 64, and each multiplying warpgroup keeps every
// other slab in registers. An element is one chain of tensor-core steps of 16 along the depth, in
// order, so a row's bits depend on neither the tile nor the other rows.
//
// What bounds it is the traffic from L2. Two blocks of a cluster hold the same rows and
// neighbouring columns; each loads half of a's slabs for both. Slabs without rows are neither
// loaded nor multiplied, so a group's last tile costs what it holds, and tiles may be as tall as
// 256 rows where groups are ragged. The feeding warp alone looks for tiles and leaves word of each
// with its first stage; results leave through shared memory, whole lines at a time.
//
// The rows of all groups are one matrix, so one tensor map serves every group: a slab that reaches
// past its group's end reads rows of the next one, which touch only rows that are not stored. In
// the weight gradient the depth is what is ragged: the last stage's rows past the group's end are
// cleared in shared memory (they may hold NaN), up to the next step of 16, and later steps are left
// out.
#ifndef JAXFP4_CUDA_SM90_BF16_GEMM_CUH_
#define JAXFP4_CUDA_SM90_BF16_GEMM_CUH_

#include <cuda_bf16.h>

#include "cute/arch/cluster_sm90.hpp"
#include "ffi/cuda/sm90_wgmma.cuh"
#include "ffi/cuda/tile_schedule.cuh"

namespace jaxfp4::cuda::sm90 {

constexpr int kSlabRows = 64;
constexpr int kMaxSlabs = 4;  // of a tile
constexpr int kTileColumns = 128;
constexpr int kTileDepth = 64;
constexpr int kStages = 4;
constexpr int kCluster = 2;  // blocks side by side along the columns
constexpr int kThreads = 384;
constexpr int kMultiplyingWarps = 8;

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
  int slabs;         // a tile's height: at most kMaxSlabs
  int column_pairs;  // tiles along the columns, two blocks' each
};

struct Stage {
  alignas(1024) uint8_t a[kMaxSlabs][kBoxBytes];
  alignas(1024) uint8_t b[kTileColumns / 64][kBoxBytes];
};

// A warp's 16 rows of results on their way out, 256 bytes of each; padded against bank conflicts.
struct Outbox {
  static constexpr int kRows = 16;
  static constexpr int kRowBytes = 256;
  static constexpr int kRowStride = kRowBytes + 16;
  alignas(16) uint8_t bytes[kRows * kRowStride];
};

// A tile of the result, as the feeding warp describes it.
struct Tile {
  int group;
  int rows;        // from `row` on, to the end of the group or of the tile
  int slabs;       // that have rows; 0: there are no more tiles
  int depth;       // of the whole product; 0 for a group without rows in the weight gradient
  int64_t row;     // of a, and of y but in the weight gradient. After the last tile: rows in use
  int64_t column;  // of b and y
  int64_t depth_begin;  // in the ragged depth

  // Stages: at least one, which brings word of the tile.
  __device__ int DepthBlocks() const { return max(1, (depth + kTileDepth - 1) / kTileDepth); }
};

struct SharedMemory {
  Stage stages[kStages];
  Outbox outboxes[kMultiplyingWarps];
  Tile tiles[kStages];  // whose first stage it is
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

// A position in the ring of stages, with the phase of its barriers.
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;

// What the sums of a row are multiplied by before they are rounded: first the operand b's scale,
// one for the tile or one a column, then the row's.
struct RowFactors {
  float row;
  float group;
  const float* column;  // null: group's for all

  __device__ float2 Apply(float sum0, float sum1, int c) const {
    const float2 b = column == nullptr ? make_float2(group, group)
                                       : __ldg(reinterpret_cast<const float2*>(column + c));
    return make_float2(__fmul_rn(__fmul_rn(sum0, b.x), row), __fmul_rn(__fmul_rn(sum1, b.y), row));
  }
};

using SlabSums = float[kTileColumns / 2];  // a thread's share of a slab: rows r and r + 8

template <Major kMajorA, Major kMajorB, bool kRaggedDepth, class Y>
class GemmKernel {
 public:
  __device__ GemmKernel(SharedMemory& memory, const GemmParams& params)
      : memory_(memory), params_(params), rank_(blockIdx.x % kCluster) {}

  __device__ void InitializeBarriers() {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) {
        ClusterBarrier::init(&memory_.full[s], 1);
        ClusterBarrier::init(&memory_.empty[s], kMultiplyingWarps * kCluster);
      }
      cutlass::arch::fence_barrier_init();
    }
    cute::cluster_sync();
  }

  // The feeding warp: every stage of every tile, in order.
  __device__ void Feed(const CUtensorMap* map_a, const CUtensorMap* map_b) {
    const bool leader = threadIdx.x % 32 == 0;
    TileSchedule schedule(
        params_.group_sizes, params_.groups, params_.rows, kSlabRows, params_.slabs,
        kRaggedDepth ? static_cast<int>((params_.tile_rows + kSlabRows - 1) / kSlabRows) : 0,
        params_.column_pairs);
    RingPosition position;
    OutputTile found;
    for (int64_t number = blockIdx.x / kCluster; schedule.Find(number, found);
         number += gridDim.x / kCluster) {
      const Tile tile = Describe(found);
      const int blocks = tile.DepthBlocks();
      for (int block = 0; block < blocks; ++block) {
        if (leader) {
          ClusterBarrier::wait(&memory_.empty[position.stage], position.phase ^ 1);
          if (block == 0) memory_.tiles[position.stage] = tile;
          FillStage(map_a, map_b, tile, block * kTileDepth, position.stage);
        }
        position.Advance();
      }
      __syncwarp();
    }
    Tile end = {};
    end.row = schedule.UsedRows();
    if (leader) {
      ClusterBarrier::wait(&memory_.empty[position.stage], position.phase ^ 1);
      memory_.tiles[position.stage] = end;
      ClusterBarrier::arrive(&memory_.full[position.stage]);
    }
  }

  // A multiplying warpgroup (0 or 1): slabs warpgroup and warpgroup + 2 of every tile.
  __device__ void Multiply(int warpgroup) {
    SlabSums sums[2];
    RingPosition position;
    while (true) {
      ClusterBarrier::wait(&memory_.full[position.stage], position.phase);
      const Tile tile = memory_.tiles[position.stage];
      if (tile.slabs == 0) {
        if constexpr (!kRaggedDepth) ZeroUnusedRows(tile.row);
        return;
      }
      if (kRaggedDepth && tile.depth == 0) {
        Release(position.stage);
        position.Advance();
        ZeroTile(tile, warpgroup);
        continue;
      }
      switch ((tile.slabs - warpgroup + 1) / 2) {
        case 0:
          MultiplyTile<0>(tile, warpgroup, position, sums);
          break;
        case 1:
          MultiplyTile<1>(tile, warpgroup, position, sums);
          StoreSlab(tile, warpgroup, sums[0]);
          break;
        default:
          MultiplyTile<2>(tile, warpgroup, position, sums);
          StoreSlab(tile, warpgroup, sums[0]);
          StoreSlab(tile, warpgroup + 2, sums[1]);
      }
    }
  }

 private:
  __device__ Tile Describe(const OutputTile& found) const {
    const int64_t row_in_group = static_cast<int64_t>(found.first_slab) * kSlabRows;
    const int64_t group_rows = kRaggedDepth ? params_.tile_rows : found.rows;
    Tile tile;
    tile.group = found.group;
    tile.slabs = found.slabs;
    tile.rows = static_cast<int>(
        min(static_cast<int64_t>(found.slabs * kSlabRows), group_rows - row_in_group));
    tile.row = row_in_group + (kRaggedDepth ? 0 : found.first_row);
    tile.column = static_cast<int64_t>(found.column_tile * kCluster + rank_) * kTileColumns;
    tile.depth_begin = kRaggedDepth ? found.first_row : 0;
    tile.depth = static_cast<int>(kRaggedDepth ? found.rows : params_.depth);
    return tile;
  }

  __device__ void FillStage(const CUtensorMap* map_a, const CUtensorMap* map_b, const Tile& tile,
                            int depth, int s) {
    constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    constexpr uint16_t kBothBlocks = 3;
    constexpr int kBoxesB = kTileColumns / 64;
    Stage& stage = memory_.stages[s];
    uint64_t* barrier = &memory_.full[s];
    const auto along = static_cast<int32_t>(tile.depth_begin + depth);
    if (tile.depth == 0) {
      ClusterBarrier::arrive(barrier);
      return;
    }
    ClusterTransactionBarrier::arrive_and_expect_tx(barrier, (tile.slabs + kBoxesB) * kBoxBytes);
#pragma unroll
    for (int i = 0; i < kBoxesB; ++i) {
      const auto across = static_cast<int32_t>(tile.column) + i * 64;
      cute::SM90_TMA_LOAD_3D::copy(
          map_b, barrier, kHint, stage.b[i], kMajorB == Major::K ? along : across,
          kMajorB == Major::K ? across : along, kRaggedDepth ? 0 : tile.group);
    }
    for (int i = rank_; i < tile.slabs; i += kCluster) {
      const auto across = static_cast<int32_t>(tile.row) + i * kSlabRows;
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(map_a, barrier, kBothBlocks, kHint, stage.a[i],
                                             kMajorA == Major::K ? along : across,
                                             kMajorA == Major::K ? across : along, 0);
    }
  }

  // This warp is done with the stage, in both blocks of the cluster.
  __device__ void Release(int s) {
    const int lane = threadIdx.x % 32;
    ClusterBarrier::arrive(&memory_.empty[s], lane, lane < kCluster);
  }

  template <int kSlabs>
  __device__ void MultiplyTile(const Tile& tile, int warpgroup, RingPosition& position,
                               SlabSums (&sums)[2]) {
    const int blocks = tile.DepthBlocks();
    int previous = -1;
    for (int block = 0; block < blocks; ++block) {
      Stage& stage = memory_.stages[position.stage];
      ClusterBarrier::wait(&memory_.full[position.stage], position.phase);
      int steps = kTileDepth / 16;
      if constexpr (kRaggedDepth) {
        const int left = tile.depth - block * kTileDepth;
        if (left < kTileDepth) {
          steps = (left + 15) / 16;
          ClearLines(stage, tile.slabs, warpgroup, left, steps * 16);
        }
      }
      if constexpr (kSlabs > 0) IssueStage<kSlabs>(stage, warpgroup, steps, block != 0, sums);
      cute::warpgroup_wait<1>();  // all but this stage's
      if (previous >= 0) Release(previous);
      previous = position.stage;
      position.Advance();
    }
    cute::warpgroup_wait<0>();
    FenceSums<kSlabs>(sums);
    if (previous >= 0) Release(previous);
  }

  // A stage's steps; fewer than all only at the end of a ragged depth.
  template <int kSlabs>
  __device__ static void IssueStage(Stage& stage, int warpgroup, int steps, bool accumulate,
                                    SlabSums (&sums)[2]) {
    switch (kRaggedDepth ? steps : kTileDepth / 16) {
      case 1:
        return IssueSteps<kSlabs, 1>(stage, warpgroup, accumulate, sums);
      case 2:
        return IssueSteps<kSlabs, 2>(stage, warpgroup, accumulate, sums);
      case 3:
        return IssueSteps<kSlabs, 3>(stage, warpgroup, accumulate, sums);
      default:
        return IssueSteps<kSlabs, 4>(stage, warpgroup, accumulate, sums);
    }
  }

  // Steps of 16 along the depth, in order, as one batch of the tensor cores.
  template <int kSlabs, int kSteps>
  __device__ static void IssueSteps(Stage& stage, int warpgroup, bool accumulate,
                                    SlabSums (&sums)[2]) {
    const uint64_t a = Descriptor<kMajorA>(SharedAddress(stage.a[warpgroup]));
    const uint64_t b = Descriptor<kMajorB>(SharedAddress(stage.b));
    FenceSums<kSlabs>(sums);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        constexpr uint64_t kTwoSlabs = 2 * kBoxBytes >> 4;
        Wgmma<kTileColumns, kMajorA, kMajorB>(a + slab * kTwoSlabs + step * kDepthStep<kMajorA>,
                                              b + step * kDepthStep<kMajorB>, sums[slab],
                                              accumulate || step != 0);
      }
    }
    cute::warpgroup_commit_batch();
  }

  // The registers are the tensor cores' from here to the wait: nothing may move across.
  template <int kSlabs>
  __device__ static void FenceSums(SlabSums (&sums)[2]) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
      for (int i = 0; i < kTileColumns / 2; ++i) asm volatile("" : "+f"(sums[slab][i])::"memory");
    }
  }

  // Zeros in lines [begin, end) of the stage's boxes: rows of the depth past the group's end.
  __device__ void ClearLines(Stage& stage, int slabs, int warpgroup, int begin, int end) {
    constexpr int kPiecesPerLine = 8;  // of 16 bytes
    const int pieces = (end - begin) * kPiecesPerLine;
    const int boxes = slabs + kTileColumns / 64;
    const int thread = warpgroup * 128 + threadIdx.x % 128;
    for (int i = thread; i < pieces * boxes; i += 2 * 128) {
      const int box = i / pieces;
      uint8_t* lines = box < slabs ? stage.a[box] : stage.b[box - slabs];
      reinterpret_cast<uint4*>(lines)[begin * kPiecesPerLine + i % pieces] = make_uint4(0, 0, 0, 0);
    }
    FenceSharedWrites();
    cutlass::arch::NamedBarrier::sync(2 * 128, 0);
  }

  // Scales, rounds and sends off a slab. Each warp has 16 of its rows, and sends 256 bytes of each
  // at a time.
  __device__ void StoreSlab(const Tile& tile, int slab, SlabSums& sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    const int first = slab * kSlabRows + warp % 4 * Outbox::kRows;  // of the warp, in the tile
    const int64_t columns = params_.columns - tile.column;
    if (first >= tile.rows || columns <= 0) return;
    RowFactors factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factors[half] = Factors(tile, first + half * 8 + lane / 4);
    }
    Outbox& outbox = memory_.outboxes[warp];
    constexpr int kPieceColumns = Outbox::kRowBytes / sizeof(Y);
#pragma unroll
    for (int begin = 0; begin < kTileColumns; begin += kPieceColumns) {
      if (begin >= columns) break;
      FillOutbox(sums, begin, static_cast<int>(columns), factors, outbox);
      __syncwarp();
      SendOutbox(tile, first, begin, static_cast<int>(min(columns - begin, int64_t{kPieceColumns})),
                 outbox);
      __syncwarp();
    }
  }

  // Two rows at a time, 16 bytes a thread.
  __device__ void SendOutbox(const Tile& tile, int first, int begin, int columns,
                             const Outbox& outbox) {
    const int lane = threadIdx.x % 32;
    const int offset = lane % 16 * 16;
    const int64_t group = kRaggedDepth ? tile.group * params_.tile_rows : 0;
    uint8_t* y = reinterpret_cast<uint8_t*>(static_cast<Y*>(params_.y) +
                                            (group + tile.row + first) * params_.columns +
                                            tile.column + begin);
    const int64_t stride = params_.columns * static_cast<int64_t>(sizeof(Y));
    if (offset >= columns * static_cast<int>(sizeof(Y))) return;
#pragma unroll
    for (int row = lane / 16; row < Outbox::kRows; row += 2) {
      if (first + row < tile.rows) {
        *reinterpret_cast<uint4*>(y + row * stride + offset) =
            *reinterpret_cast<const uint4*>(outbox.bytes + row * Outbox::kRowStride + offset);
      }
    }
  }

  __device__ RowFactors Factors(const Tile& tile, int row) {
    RowFactors factors = {1.0f, 1.0f, nullptr};
    if constexpr (!kRaggedDepth) {
      if (params_.a_scale != nullptr && row < tile.rows) {
        factors.row = __ldg(params_.a_scale + (tile.row + row) * params_.a_scale_stride);
      }
      if (params_.b_scale != nullptr) {
        const float* scale = params_.b_scale + tile.group * params_.b_scale_group_stride;
        factors.group = __ldg(scale);
        if (params_.b_scale_by_column) factors.column = scale + tile.column;
      }
    }
    return factors;
  }

  // Columns [begin, begin + 128) in bf16, or [begin, begin + 64) in fp32.
  __device__ static void FillOutbox(SlabSums& sums, int begin, int columns,
                                    const RowFactors (&factors)[2], Outbox& outbox) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(Y) == 2) {
      uint8_t* to = outbox.bytes + lane % 16 * Outbox::kRowStride + lane / 16 * 16;
#pragma unroll
      for (int piece = 0; piece < kTileColumns / 8; piece += 2) {
        uint32_t packed[4];  // rows and rows + 8 of a piece of 8 columns, then of the next
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          const int column = (piece + p / 2) * 8 + lane % 4 * 2;
          const int i = (piece + p / 2) * 4 + p % 2 * 2;
          const float2 scaled =
              factors[p % 2].Apply(sums[i], sums[i + 1], column < columns ? column : 0);
          packed[p] = PackBf16(scaled.x, scaled.y);
        }
        cute::SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3],
                                      *reinterpret_cast<cute::uint128_t*>(to + piece * 16));
      }
    } else {
#pragma unroll
      for (int piece = 0; piece < 8; ++piece) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = begin + piece * 8 + lane % 4 * 2;
          const int i = (begin / 8 + piece) * 4 + half * 2;
          *reinterpret_cast<float2*>(outbox.bytes + (half * 8 + lane / 4) * Outbox::kRowStride +
                                     (piece * 8 + lane % 4 * 2) * 4) =
              factors[half].Apply(sums[i], sums[i + 1], column < columns ? column : 0);
        }
      }
    }
  }

  __device__ static uint32_t PackBf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
  }

  // The result of a group without rows. (The sums are not touched: registers that anything but the
  // tensor cores writes would make the compiler serialise them.)
  __device__ void ZeroTile(const Tile& tile, int warpgroup) {
    constexpr int kPieceColumns = 16 / sizeof(Y);
    const int64_t columns =
        max(int64_t{0}, min(int64_t{kTileColumns}, params_.columns - tile.column));
    const int pieces = static_cast<int>(columns) / kPieceColumns;
    Y* y = static_cast<Y*>(params_.y) +
           (tile.group * params_.tile_rows + tile.row) * params_.columns + tile.column;
    for (int i = warpgroup * 128 + threadIdx.x % 128; i < tile.rows * pieces; i += 2 * 128) {
      *reinterpret_cast<uint4*>(y + i / pieces * params_.columns + i % pieces * kPieceColumns) =
          make_uint4(0, 0, 0, 0);
    }
  }

  // Rows of no group, by all multiplying threads of the grid.
  __device__ void ZeroUnusedRows(int64_t used_rows) {
    const int64_t begin = used_rows * params_.columns * sizeof(Y) / 16;
    const int64_t end = params_.rows * params_.columns * sizeof(Y) / 16;
    uint4* y = static_cast<uint4*>(params_.y);
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x - 128;
    for (int64_t i = begin + thread; i < end; i += static_cast<int64_t>(gridDim.x) * 256) {
      y[i] = make_uint4(0, 0, 0, 0);
    }
  }

  SharedMemory& memory_;
  const GemmParams& params_;
  const int rank_;
};

template <Major kMajorA, Major kMajorB, bool kRaggedDepth, class Y>
__global__ __launch_bounds__(kThreads,
                             1) void GemmGlobal(const __grid_constant__ CUtensorMap map_a,
                                                const __grid_constant__ CUtensorMap map_b,
                                                const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& memory = *reinterpret_cast<SharedMemory*>(shared);
  GemmKernel<kMajorA, kMajorB, kRaggedDepth, Y> kernel(memory, params);
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
  cute::cluster_sync();
}

}  // namespace jaxfp4::cuda::sm90

#endif  // JAXFP4_CUDA_SM90_BF16_GEMM_CUH_
