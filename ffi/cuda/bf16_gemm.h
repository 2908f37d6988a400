// The BF16 matrix products on a GPU, dense and over groups; operands as in docs/design.md.
//
// A dense product is one group: group_sizes null, groups 1. Every function only launches on the
// stream. Groups whose sizes are negative or add up to more than `rows` are cut off at `rows`.
#ifndef JAXFP4_CUDA_BF16_GEMM_H_
#define JAXFP4_CUDA_BF16_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxfp4::cuda {

// fp32 factors: none (count 0), one for all (1), or one each.
struct GemmScales {
  const float* data = nullptr;
  int64_t count = 0;
};

struct Gemm {
  const uint16_t* a = nullptr;  // bf16
  const uint16_t* b = nullptr;  // bf16
  void* y = nullptr;            // bf16, or fp32 if y_is_fp32
  bool y_is_fp32 = false;
  GemmScales a_scale, b_scale;  // forward alone; b_scale one a group, or one a group and column
  const int32_t* group_sizes = nullptr;
  int64_t groups = 1;
  int64_t rows = 0;     // of x and g: M
  int64_t outputs = 0;  // of the linear layer: N
  int64_t inputs = 0;   // of the linear layer: K
};

// y [M, N] = a [M, K] times b [G, N, K] transposed, times the group's scale, then the row's.
cudaError_t GemmForward(const Gemm& gemm, cudaStream_t stream);
// y [M, K] = a [M, N] times b [G, N, K].
cudaError_t GemmInputGradient(const Gemm& gemm, cudaStream_t stream);
// y [G, N, K] = a [M, N] transposed times b [M, K], over each group's rows.
cudaError_t GemmWeightGradient(const Gemm& gemm, cudaStream_t stream);

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_BF16_GEMM_H_
