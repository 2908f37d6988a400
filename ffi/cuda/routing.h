// Launches of router_topk, combine_experts and combine_experts_grad. Results are those of
// ffi/cpu/rowwise.h to the bit (which NaN a NaN is excepted). T is float, or uint16_t for bf16.
#ifndef JAXFP4_CUDA_ROUTING_H_
#define JAXFP4_CUDA_ROUTING_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxfp4::cuda {

// A warp holds a row's probabilities and its k weights in shared memory, 4 bytes each.
constexpr int64_t kLargestRouterRow = 12288;  // num_experts + k

// The k largest of softmax(logits), largest first, ties to the lowest index.
struct RouterTopKArgs {
  int64_t rows, num_experts, k;  // num_experts + k at most kLargestRouterRow
  const float* logits;           // [rows, num_experts]
  const int32_t* given_experts;  // [rows, k] or null: the choice is made here
  bool norm_topk_prob;           // divide by the k weights' sum, added in rank order
  float* weights;                // [rows, k]; 0 for a given expert outside [0, num_experts)
  int32_t* experts;              // [rows, k]
};

cudaError_t RouterTopK(cudaStream_t stream, const RouterTopKArgs& args);

// out[rows, width] = sum over j of weights[rows, k] * y[slots[rows, k]], j ascending. A slot
// outside [0, y_rows) adds nothing.
template <class T>
struct CombineExpertsArgs {
  int64_t y_rows, width, rows, k;  // rows * k and y_rows below 2^31
  const T* y;                      // [y_rows, width]
  const float* weights;            // [rows, k]
  const int32_t* slots;            // [rows, k]

  // The row of y that a slot names, or null where it is outside y.
  __host__ __device__ const T* SlotRow(int32_t slot) const {
    return slot >= 0 && slot < y_rows ? y + slot * width : nullptr;
  }
};

template <class T>
cudaError_t CombineExperts(cudaStream_t stream, const CombineExpertsArgs<T>& args, T* out);

// dy[y_rows, width] and dweights[rows, k] from d_out[rows, width]. A slot that is used several
// times sums its uses in row order.
template <class T>
cudaError_t CombineExpertsGrad(cudaStream_t stream, const CombineExpertsArgs<T>& args,
                               const T* d_out, T* dy, float* dweights);

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_ROUTING_H_
