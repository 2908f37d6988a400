// What is computed from a row before it is quantised, a block of 16 values at a time.
//
// A row is shared by the blockDim.x threads with one threadIdx.y, a multiple of a warp; where that
// is more than a warp, blockDim.y is 1.
#ifndef JAXFP4_CUDA_QUANTIZE_FRONTS_CUH_
#define JAXFP4_CUDA_QUANTIZE_FRONTS_CUH_

#include <cstdint>

#include "ffi/cuda/nvfp4_block.cuh"
#include "ffi/cuda/quantize.h"
#include "ffi/numerics.h"

namespace jaxfp4::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(uint16_t x) { return Bf16ToFloat(x); }

// What is read of x for one block.
template <class T, Front kFront>
struct RawBlock {
  Block<T> x;
};

template <class T>
struct RawBlock<T, Front::kSwiGlu> {
  Block<T> gate, up;
};

template <Front kFront, class T>
__device__ __forceinline__ RawBlock<T, kFront> LoadRaw(const T* row, int64_t depth, int block) {
  const T* x = row + static_cast<int64_t>(block) * kBlock;
  if constexpr (kFront == Front::kSwiGlu) {
    return {LoadBlock(x), LoadBlock(x + depth)};
  } else {
    return {LoadBlock(x)};
  }
}

// --- SwiGLU ---

// Any gates. A loop, because it is rare and long.
template <class T>
__device__ __noinline__ void SwiGluFar(const Block<T>* gate, Block<T>* up) {
  const T* gates = reinterpret_cast<const T*>(gate);
  T* ups = reinterpret_cast<T*>(up);
#pragma unroll 1
  for (int i = 0; i < kBlock; ++i) {
    StoreRounded(SwiGlu(ToFloat(gates[i]), ToFloat(ups[i])), ups + i);
  }
}

template <class T>
__device__ __forceinline__ Block<T> SwiGluBlock(const Block<T>& gate, const Block<T>& up) {
  Block<T> y;
  if (FromBits(LargestMagnitude(gate)) < kNearGate) {
    float v[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = SwiGluNear(gate.Value(i), up.Value(i));
    RoundBlock(v, &y);
  } else {
    const Block<T> gate_in_memory = gate;
    Block<T> up_in_memory = up;
    SwiGluFar(&gate_in_memory, &up_in_memory);
    y = up_in_memory;
  }
  return y;
}

// --- RMSNorm ---

// Waits for the row's threads.
__device__ __forceinline__ void SyncRow() {
  if (blockDim.x == kWarpSize) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// 1 / sqrt(mean(x^2) + eps) of a row in global or shared memory, its sum in the order of RowTree:
// lane j of the row's first warp adds the elements j, j + 32, ... in turn. Every thread of the row
// calls it; every one gets the result.
template <class T>
__device__ __forceinline__ float InverseRmsOfRow(const T* x, int64_t depth, float eps) {
  float sum = 0.0f;
  if (threadIdx.x < kWarpSize) {
    const int width = static_cast<int>(depth);
#pragma unroll 8
    for (int k = threadIdx.x; k < width; k += kWarpSize) {
      const float value = ToFloat(x[k]);
      sum = Add(sum, Mul(value, value));
    }
    for (int stride = kRowPartials / 2; stride > 0; stride /= 2) {
      sum = Add(sum, __shfl_xor_sync(kAllLanes, sum, stride));
    }
  }
  if (blockDim.x > kWarpSize) {
    __shared__ float of_row;
    __syncthreads();  // of_row of the row before has been read
    if (threadIdx.x == 0) of_row = sum;
    __syncthreads();
    sum = of_row;
  }
  return InverseRms(sum, depth, eps);
}

template <class T>
__device__ __forceinline__ Block<T> RmsNormBlock(const Block<T>& x, float inverse_rms,
                                                 const float* weight) {
  const Block<float> w = LoadBlock(weight);
  float v[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = RmsNorm(x.Value(i), inverse_rms, w.Value(i));
  Block<T> y;
  RoundBlock(v, &y);
  return y;
}

// --- Any front ---

// The block's values after the front, rounded to T. `inverse_rms` is of RMSNorm alone.
template <class T, Front kFront>
__device__ __forceinline__ Block<T> ApplyFront(const RawBlock<T, kFront>& raw, float inverse_rms,
                                               const float* weight, int block) {
  if constexpr (kFront == Front::kSwiGlu) {
    return SwiGluBlock(raw.gate, raw.up);
  } else if constexpr (kFront == Front::kRmsNorm) {
    return RmsNormBlock(raw.x, inverse_rms, weight + static_cast<int64_t>(block) * kBlock);
  } else {
    return raw.x;
  }
}

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_QUANTIZE_FRONTS_CUH_
