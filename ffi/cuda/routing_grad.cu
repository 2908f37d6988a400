// The derivatives of combine_experts.
//
// * dweights[m, j], the sum along d_out[m] * y[slot]: 32 / kPerLane lanes for each (m, j), in the
//   order of RowTree. Both rows are read once from memory (d_out[m] k times, from the caches).
// * dy[slot], the sum of weights[m, j] * d_out[m] over the (m, j) that name the slot, ascending. A
//   block owns a range of slots. It reads all of `slots` in order and keeps those in its range as a
//   list in shared memory, links the entries of each slot in order, and then sums slot by slot: a
//   warp a slot, the sums in registers. Nearly always a slot is used once. Where the list does not
//   fit, the block goes through `slots` once for every slot of its own.
//   `slots` is small and comes from the L2 cache, so memory bounds this too.
#include <algorithm>

#include "ffi/cuda/grid.cuh"
#include "ffi/cuda/routing.h"
#include "ffi/cuda/row_lanes.cuh"
#include "ffi/cuda/values.cuh"
#include "ffi/numerics.h"

namespace jaxfp4::cuda {
namespace {

// --- dweights ---

constexpr int kWeightThreads = 128;

template <class T, int kPer>
__global__ void __launch_bounds__(kWeightThreads)
    WeightGradKernel(CombineExpertsArgs<T> args, const T* __restrict__ d_out,
                     float* __restrict__ dweights) {
  constexpr int kSteps = 16;
  const RowLane<kPer> lane;  // its row is an index into weights
  const bool inside = lane.row < args.rows * args.k;
  const T* y = inside ? args.SlotRow(args.slots[lane.row]) : nullptr;
  float partial[kPer] = {};
  if (y != nullptr) {
    const T* d = d_out + lane.row / args.k * args.width;
    for (int64_t first = 0; first < args.width; first += kSteps * kWarp) {
      Pack<T, kPer> y_packs[kSteps], d_packs[kSteps];
      LoadSteps<kPer, kSteps>(y, first, args.width, lane.column, y_packs);
      LoadSteps<kPer, kSteps>(d, first, args.width, lane.column, d_packs);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int e = 0; e < kPer; ++e) {
          partial[e] = Add(partial[e], Mul(d_packs[s][e], y_packs[s][e]));
        }
      }
    }
  }
  __syncwarp();
  const float sum = RowTreeOverLanes(partial);
  if (inside && lane.column == 0) dweights[lane.row] = sum;
}

// --- dy ---

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kEntriesPerThread = 8;
constexpr int kTile = kThreads * kEntriesPerThread;  // entries of `slots` read together
constexpr int kCapacity = 2 * kTile;                 // uses that a block's list holds
constexpr int kLargestRange = 1024;                  // slots of a block
constexpr int kNone = kCapacity;                     // no place in the list
constexpr int kUnroll = 4;                           // packs of a row that a lane sums together

struct Uses {
  unsigned index[kCapacity];      // into weights, ascending
  int first[kLargestRange];       // the slot's first use in this list, or kNone
  int16_t next[kCapacity];        // the same slot's next use, or kNone
  int16_t slot[kCapacity];        // counted from the range's first
  int16_t latest[kLargestRange];  // while the uses are linked
  int count;
  int warp_count[kWarps];
};

// This thread's entries of the tile at `begin`, counted from `first`. A slot below it wraps to far
// above it.
__device__ __forceinline__ void LoadTile(const int32_t* __restrict__ slots, unsigned begin,
                                         unsigned total, unsigned first,
                                         unsigned (&local)[kEntriesPerThread]) {
  const unsigned own = begin + threadIdx.x * kEntriesPerThread;
#pragma unroll
  for (int i = 0; i < kEntriesPerThread; ++i) {
    local[i] = own + i < total ? static_cast<unsigned>(slots[own + i]) - first : ~0u;
  }
}

// Puts the uses of slots [first, first + range) among entries [begin, total) into the list until
// another tile might not fit. Returns the entry that it stopped at. All threads of the block call
// it and agree.
__device__ unsigned Collect(const int32_t* __restrict__ slots, unsigned begin, unsigned total,
                            unsigned first, unsigned range, Uses& uses) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int count = 0;
  unsigned ahead[kEntriesPerThread];
  LoadTile(slots, begin, total, first, ahead);
  for (; begin < total && count <= kCapacity - kTile; begin += kTile) {
    unsigned local[kEntriesPerThread];
    unsigned hits = 0;
#pragma unroll
    for (int i = 0; i < kEntriesPerThread; ++i) {
      local[i] = ahead[i];
      if (local[i] < range) hits |= 1u << i;
    }
    LoadTile(slots, begin + kTile, total, first, ahead);
    if (__syncthreads_or(hits != 0) == 0) continue;
    const int found = __popc(hits);
    int before = found;  // found by this lane and those before it
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, before, step);
      if (lane >= step) before += other;
    }
    if (lane == kWarp - 1) uses.warp_count[warp] = before;
    __syncthreads();
    int place = count + before - found;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += uses.warp_count[w];
      count += uses.warp_count[w];
    }
#pragma unroll
    for (int i = 0; i < kEntriesPerThread; ++i) {
      if ((hits >> i & 1u) == 0) continue;
      uses.index[place] = begin + threadIdx.x * kEntriesPerThread + i;
      uses.slot[place] = static_cast<int16_t>(local[i]);
      ++place;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) uses.count = count;
  __syncthreads();
  return begin;
}

// Each slot's uses as a chain in ascending order.
__device__ void Link(int range, Uses& uses) {
  for (int slot = threadIdx.x; slot < range; slot += kThreads) uses.first[slot] = kNone;
  __syncthreads();
  for (int i = threadIdx.x; i < uses.count; i += kThreads) {
    atomicMin(&uses.first[uses.slot[i]], i);
    uses.next[i] = kNone;
  }
  __syncthreads();
  bool again = false;
  for (int i = threadIdx.x; i < uses.count; i += kThreads) {
    again = again || uses.first[uses.slot[i]] != i;
  }
  if (__syncthreads_or(again) == 0) return;
  // Some slot is used again: one thread takes all uses of a slot in order.
  for (int i = 0; i < uses.count; ++i) {
    const int slot = uses.slot[i];
    if (slot % kThreads != static_cast<int>(threadIdx.x)) continue;
    if (uses.first[slot] != i) uses.next[uses.latest[slot]] = static_cast<int16_t>(i);
    uses.latest[slot] = static_cast<int16_t>(i);
  }
  __syncthreads();
}

template <class T, int kCount>
struct RowGrad {
  const CombineExpertsArgs<T>& args;
  const T* d_out;
  int64_t column;  // of the first pack; the others follow at a distance of a warp's packs
  float total[kUnroll][kCount];

  __device__ __forceinline__ RowGrad(const CombineExpertsArgs<T>& args, const T* d_out,
                                     int64_t column)
      : args(args), d_out(d_out), column(column), total{} {}

  __device__ __forceinline__ bool Has(int u) const {
    return column + u * kWarp * kCount < args.width;
  }

  __device__ __forceinline__ void AddUse(unsigned index) {
    const float weight = args.weights[index];
    const T* d = d_out + index / static_cast<unsigned>(args.k) * args.width + column;
    Pack<T, kCount> packs[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (Has(u)) packs[u] = LoadPack<kCount>(d + u * kWarp * kCount);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!Has(u)) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        total[u][i] = Add(total[u][i], Mul(weight, packs[u][i]));
      }
    }
  }

  __device__ __forceinline__ void Store(T* dy) const {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (Has(u)) StorePack<kCount>(total[u], dy + column + u * kWarp * kCount);
    }
  }
};

template <class T, int kCount>
__global__ void __launch_bounds__(kThreads)
    SlotGradKernel(CombineExpertsArgs<T> args, int range, const T* __restrict__ d_out,
                   T* __restrict__ dy) {
  __shared__ Uses uses;
  constexpr int64_t kColumns = kUnroll * kWarp * kCount;  // that a warp sums at once
  const int first = blockIdx.x * range;
  const unsigned total = static_cast<unsigned>(args.rows * args.k);
  range = min(range, static_cast<int>(args.y_rows) - first);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  if (Collect(args.slots, 0, total, first, range, uses) >= total) {
    Link(range, uses);
    for (int slot = warp; slot < range; slot += kWarps) {
      for (int64_t column = lane * kCount; column < args.width; column += kColumns) {
        RowGrad<T, kCount> grad(args, d_out, column);
        for (int use = uses.first[slot]; use != kNone; use = uses.next[use]) {
          grad.AddUse(uses.index[use]);
        }
        grad.Store(dy + (first + int64_t{slot}) * args.width);
      }
    }
    return;
  }
  // Too many uses: the block's warps take a slot's columns together, through all of its uses.
  for (int slot = first; slot < first + range; ++slot) {
    for (int64_t base = 0; base < args.width; base += kWarps * kColumns) {
      RowGrad<T, kCount> grad(args, d_out, base + warp * kColumns + lane * kCount);
      for (unsigned begin = 0; begin < total;) {
        __syncthreads();
        begin = Collect(args.slots, begin, total, slot, 1, uses);
        for (int i = 0; i < uses.count; ++i) grad.AddUse(uses.index[i]);
      }
      grad.Store(dy + int64_t{slot} * args.width);
    }
  }
}

// Every block reads all of `slots`: about as many blocks as run at once.
constexpr int64_t kSlotBlocksWanted = 256;

template <int kCount, class T>
cudaError_t LaunchSlotGrad(cudaStream_t stream, const CombineExpertsArgs<T>& args, const T* d_out,
                           T* dy) {
  const int range = static_cast<int>(
      std::clamp<int64_t>(CeilDiv(args.y_rows, kSlotBlocksWanted), kWarps, kLargestRange));
  SlotGradKernel<T, kCount>
      <<<CeilDiv(args.y_rows, range), kThreads, 0, stream>>>(args, range, d_out, dy);
  return cudaGetLastError();
}

template <int kPer, class T>
cudaError_t LaunchWeightGrad(cudaStream_t stream, const CombineExpertsArgs<T>& args, const T* d_out,
                             float* dweights) {
  const int64_t blocks = CeilDiv(args.rows * args.k, kWeightThreads / RowLane<kPer>::kLanes);
  WeightGradKernel<T, kPer><<<blocks, kWeightThreads, 0, stream>>>(args, d_out, dweights);
  return cudaGetLastError();
}

}  // namespace

template <class T>
cudaError_t CombineExpertsGrad(cudaStream_t stream, const CombineExpertsArgs<T>& args,
                               const T* d_out, T* dy, float* dweights) {
  if (args.rows * args.k > 0) {
    const cudaError_t error = args.width % kPerLane<T> == 0
                                  ? LaunchWeightGrad<kPerLane<T>>(stream, args, d_out, dweights)
                                  : LaunchWeightGrad<1>(stream, args, d_out, dweights);
    if (error != cudaSuccess) return error;
  }
  if (args.y_rows == 0 || args.width == 0) return cudaSuccess;
  if (args.width % kWidestPack<T> == 0) {
    return LaunchSlotGrad<kWidestPack<T>>(stream, args, d_out, dy);
  }
  return LaunchSlotGrad<1>(stream, args, d_out, dy);
}

template cudaError_t CombineExpertsGrad<float>(cudaStream_t, const CombineExpertsArgs<float>&,
                                               const float*, float*, float*);
template cudaError_t CombineExpertsGrad<uint16_t>(cudaStream_t, const CombineExpertsArgs<uint16_t>&,
                                                  const uint16_t*, uint16_t*, float*);

}  // namespace jaxfp4::cuda
