// Quantising rows to NVFP4 on a GPU: what the three quantize custom calls share.
#ifndef JAXFP4_CUDA_QUANTIZE_H_
#define JAXFP4_CUDA_QUANTIZE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/front.h"

namespace jaxfp4::cuda {

struct QuantizeArgs {
  // Input. T in Quantize<T> is float, or uint16_t for bf16.
  const void* x;
  int64_t x_rows;
  int64_t depth;               // K, a multiple of 16
  const float* front_weight;   // [K], kRmsNorm only
  const int32_t* gather;       // [rows] or null: row i is x's row gather[i]; outside x, zeros
  const float* amax;           // one per scale, or null: found here
  const int32_t* group_sizes;  // [groups]: rows past their sum come out zero with scale 1
  int64_t groups;              // 0: every row is in use
  int64_t rows;                // rows of the output
  int64_t rows_per_scale;      // consecutive rows that share one fp32 scale: 1 for scope row
  Front front;
  float eps;
  bool pow2_scale;
  bool four_over_six;

  // Output. Either codes and block scales, or values (code times block scale, exact in bf16).
  uint8_t* codes;             // [rows, K/2]
  uint8_t* block_scales;      // linear [rows, K/16], or tiled
  int64_t tiled_scale_bytes;  // size of tiled block scales; 0: they are linear
  uint16_t* values;           // [rows, K]
  float* scale;               // [rows / rows_per_scale]
};

// A row is read once where it has its own scale or amax is given. Else a pass before finds the amax
// of every scale and keeps it in `scale` as bits, which a last kernel turns into scales: there is
// no workspace. Bit for bit what cpu::Quantize gives.
template <class T>
cudaError_t Quantize(cudaStream_t stream, const QuantizeArgs& args);

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_QUANTIZE_H_
