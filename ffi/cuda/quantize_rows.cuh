// Rows of x as the quantizers read them: gathered, and through a front.
//
// A row is shared by the blockDim.x threads with one threadIdx.y, a multiple of a warp; where that
// is more than a warp, blockDim.y is 1. Thread t holds the row's blocks t, t + blockDim.x, ...
#ifndef JAXFP4_CUDA_QUANTIZE_ROWS_CUH_
#define JAXFP4_CUDA_QUANTIZE_ROWS_CUH_

#include <cstdint>

#include "ffi/cuda/nvfp4_block.cuh"
#include "ffi/cuda/quantize.h"
#include "ffi/numerics.h"
#include "ffi/scale_layout.h"

namespace jaxfp4::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(uint16_t x) { return Bf16ToFloat(x); }

// --- group_sizes, read on the device. A size below 0 counts as 0, and rows past the last as none.

// Rows in use. Every lane of the warp calls it.
__device__ __forceinline__ int64_t UsedRows(const QuantizeArgs& args) {
  if (args.groups == 0) return args.rows;
  int64_t sum = 0;
  for (int64_t g = threadIdx.x % kWarpSize; g < args.groups; g += kWarpSize) {
    sum += max(__ldg(args.group_sizes + g), 0);
  }
  for (int stride = kWarpSize / 2; stride > 0; stride /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, stride);
  }
  return min(sum, args.rows);
}

__device__ __forceinline__ int64_t SumOverLowerLanes(int64_t x, int lane) {
  for (int stride = 1; stride < kWarpSize; stride *= 2) {
    const int64_t lower = __shfl_up_sync(kAllLanes, x, stride);
    if (lane >= stride) x += lower;
  }
  return x;
}

// The place of a row in use among rows of which each group begins at its own 128-row tile. Every
// lane of the warp calls it with the same row.
__device__ __forceinline__ int64_t TiledRow(const QuantizeArgs& args, int64_t row) {
  const int lane = threadIdx.x % kWarpSize;
  int64_t first_row = 0, first_place = 0;  // of the 32 groups looked at
  for (int64_t base = 0; base < args.groups; base += kWarpSize) {
    const int64_t g = base + lane;
    const int64_t size = g < args.groups ? max(__ldg(args.group_sizes + g), 0) : 0;
    const int64_t padded = (size + kScaleTileRows - 1) / kScaleTileRows * kScaleTileRows;
    const int64_t end = first_row + SumOverLowerLanes(size, lane);
    const int64_t place_end = first_place + SumOverLowerLanes(padded, lane);
    const unsigned later = __ballot_sync(kAllLanes, row < end);
    if (later != 0) {
      const int64_t place = place_end - padded + (row - (end - size));
      return __shfl_sync(kAllLanes, place, __ffs(later) - 1);
    }
    first_row = __shfl_sync(kAllLanes, end, kWarpSize - 1);
    first_place = __shfl_sync(kAllLanes, place_end, kWarpSize - 1);
  }
  return row;
}

// --- Reductions over a row's threads ---

// Every thread of the row calls it; every one gets the result.
__device__ __forceinline__ uint32_t MaxOverRow(uint32_t x) {
  x = __reduce_max_sync(kAllLanes, x);
  if (blockDim.x == kWarpSize) return x;
  __shared__ uint32_t of_warp[kWarpSize];
  if (threadIdx.x < kWarpSize) of_warp[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return __reduce_max_sync(kAllLanes, of_warp[threadIdx.x % kWarpSize]);
}

// 1 / sqrt(mean(x^2) + eps) of a row, its sum in the order of RowTree: lane j adds the elements
// j, j + 32, ... in turn. Every thread of the row calls it; every one gets the result.
template <class T>
__device__ __forceinline__ float InverseRmsOfRow(const T* x, int64_t depth, float eps) {
  float sum = 0.0f;
  if (threadIdx.x < kWarpSize) {
#pragma unroll 8
    for (int64_t k = threadIdx.x; k < depth; k += kWarpSize) {
      const float value = ToFloat(__ldg(x + k));
      sum = Add(sum, Mul(value, value));
    }
    for (int stride = kRowPartials / 2; stride > 0; stride /= 2) {
      sum = Add(sum, __shfl_xor_sync(kAllLanes, sum, stride));
    }
  }
  if (blockDim.x > kWarpSize) {
    __shared__ float of_row;
    __syncthreads();  // the row before has been read
    if (threadIdx.x == 0) of_row = sum;
    __syncthreads();
    sum = of_row;
  }
  return InverseRms(sum, depth, eps);
}

// --- A row's values ---

template <class T, Front kFront>
class Row {
 public:
  // A row that is in use. Every thread of the row constructs it.
  __device__ __forceinline__ Row(const QuantizeArgs& args, int64_t row)
      : weight_(args.front_weight), depth_(args.depth) {
    const int64_t source = args.gather == nullptr ? row : __ldg(args.gather + row);
    if (source < 0 || source >= args.x_rows) return;
    const int64_t width = kFront == Front::kSwiGlu ? 2 * depth_ : depth_;
    x_ = static_cast<const T*>(args.x) + source * width;
    if constexpr (kFront == Front::kRmsNorm) {
      inverse_rms_ = InverseRmsOfRow(x_, depth_, args.eps);
    }
  }

  // The 16 values after the front, rounded to T.
  __device__ __forceinline__ Block<T> Load(int64_t block) const {
    if (x_ == nullptr) return {};
    const int64_t k = block * kBlock;
    Block<T> x = LoadBlock(x_ + k);
    if constexpr (kFront == Front::kSwiGlu) {
      const Block<T> up = LoadBlock(x_ + depth_ + k);
      float v[kBlock];
#pragma unroll
      for (int i = 0; i < kBlock; ++i) v[i] = SwiGlu(x.Value(i), up.Value(i));
      RoundBlock(v, &x);
    }
    if constexpr (kFront == Front::kRmsNorm) {
      const Block<float> weight = LoadBlock(weight_ + k);
      float v[kBlock];
#pragma unroll
      for (int i = 0; i < kBlock; ++i) v[i] = RmsNorm(x.Value(i), inverse_rms_, weight.Value(i));
      RoundBlock(v, &x);
    }
    return x;
  }

 private:
  const T* x_ = nullptr;  // null: a row of zeros
  const float* weight_;
  int64_t depth_;
  float inverse_rms_ = 0.0f;
};

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_QUANTIZE_ROWS_CUH_
