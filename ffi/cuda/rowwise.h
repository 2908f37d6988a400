// Launches of rmsnorm, swiglu and qk_norm_rope. Results are those of ffi/cpu/rowwise.h to the bit
// (which NaN a NaN is excepted). T is float, or uint16_t for bf16.
#ifndef JAXFP4_CUDA_ROWWISE_H_
#define JAXFP4_CUDA_ROWWISE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxfp4::cuda {

// y[rows, width] = x * (1 / sqrt(mean(x^2) + eps)) * weight[width]
template <class T>
cudaError_t RmsNormRows(cudaStream_t stream, int64_t rows, int64_t width, const T* x,
                        const float* weight, float eps, T* y);

// y[rows, width] = silu(gate) * up, where x[rows, 2 * width] holds the gates first.
template <class T>
cudaError_t SwiGluRows(cudaStream_t stream, int64_t rows, int64_t width, const T* x, T* y);

// What a block's shared memory holds of one token's cosines and sines.
constexpr int64_t kLargestHeadDim = 8192;

template <class T>
struct QkNormRopeArgs {
  int64_t tokens, heads, head_dim;  // head_dim even, at most kLargestHeadDim
  const T* x;                       // [tokens, heads, head_dim]
  const float* weight;              // [head_dim] or null: no norm
  const int32_t* positions;         // [tokens]
  const float* inv_freq;            // [head_dim / 2]
  float eps;
  T* y;  // [tokens, heads, head_dim]
};

template <class T>
cudaError_t QkNormRope(cudaStream_t stream, const QkNormRopeArgs<T>& args);

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_ROWWISE_H_
