// A row spread over the lanes of a warp so that its sum has the order of RowTree.
//
// Partial sum j takes the elements j, j + 32, j + 64, ... in turn. A lane owns kPer neighbouring
// partial sums and loads their elements of one step (32 elements of the row) together; 32 / kPer
// lanes hold a row and a warp holds kPer rows. So each load of a warp covers whole sectors, no
// element moves between lanes before the tree, and the tree is a butterfly of shuffles, after
// which every lane of the row has the sum. Lanes add in either order, which for two operands gives
// the same bits.
#ifndef JAXFP4_CUDA_ROW_LANES_CUH_
#define JAXFP4_CUDA_ROW_LANES_CUH_

#include <cstdint>

#include "ffi/cuda/values.cuh"
#include "ffi/numerics.h"

namespace jaxfp4::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
static_assert(kRowPartials == kWarp);

// Four bytes a lane: 128 bytes a load of a warp, and the whole row of 2048 values in 64 registers.
template <class T>
constexpr int kPerLane = 4 / sizeof(T);

// This thread's place where consecutive groups of 32 / kPer threads take consecutive rows.
template <int kPer>
struct RowLane {
  static constexpr int kLanes = kWarp / kPer;
  int64_t row;
  int column;  // of the lane's first element in each step

  __device__ __forceinline__ RowLane()
      : row((static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes),
        column(static_cast<int>(threadIdx.x % kLanes) * kPer) {}
};

// Elements row[first + 32 s + column + e] of kSteps steps; zeros from `width` on, which as further
// terms change no partial sum of squares, exponentials or products that begins at +0.
template <int kPer, int kSteps, class T>
__device__ __forceinline__ void LoadSteps(const T* row, int64_t first, int64_t width, int column,
                                          Pack<T, kPer> (&packs)[kSteps]) {
  const int64_t left = width - first - column;
  const int limit = left < kSteps * kWarp ? static_cast<int>(left) : kSteps * kWarp;
  const T* start = row + first + column;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    packs[s] = s * kWarp < limit ? LoadPack<kPer>(start + s * kWarp) : Pack<T, kPer>{};
  }
}

// The sum of a row's 32 partial sums, in all of its lanes. Every lane of the warp must call it.
template <int kPer>
__device__ __forceinline__ float RowTreeOverLanes(float (&partial)[kPer]) {
#pragma unroll
  for (int stride = kRowPartials / 2; stride >= kPer; stride /= 2) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      partial[e] = Add(partial[e], __shfl_xor_sync(kAllLanes, partial[e], stride / kPer));
    }
  }
#pragma unroll
  for (int stride = kPer / 2; stride > 0; stride /= 2) {
#pragma unroll
    for (int e = 0; e < stride; ++e) partial[e] = Add(partial[e], partial[e + stride]);
  }
  return partial[0];
}

// The largest over the warp, NaN passed over as in cpu::RowMax.
__device__ __forceinline__ float MaxOverLanes(float x) {
#pragma unroll
  for (int stride = kWarp / 2; stride > 0; stride /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, stride));
  }
  return x;
}

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_ROW_LANES_CUH_
