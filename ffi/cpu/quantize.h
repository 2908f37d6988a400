// Quantising rows to NVFP4 on the CPU: what the three quantize custom calls share.
#ifndef JAXFP4_CPU_QUANTIZE_H_
#define JAXFP4_CPU_QUANTIZE_H_

#include <cstdint>

#include "ffi/cpu/parallel.h"
#include "ffi/front.h"

namespace jaxfp4::cpu {

struct QuantizeArgs {
  // Input. T in Quantize<T> is float, or uint16_t for bf16.
  const void* x;
  int64_t x_rows;
  int64_t depth;              // K, a multiple of 16
  const float* front_weight;  // [K], kRmsNorm only
  const int32_t* gather;      // [rows] or null: row i is x's row gather[i]; outside x, zeros
  const float* amax;          // one per scale, or null: found here
  int64_t rows;               // rows of the output
  int64_t used_rows;          // later rows are not read; they come out zero with scale 1
  int64_t rows_per_scale;     // consecutive rows that share one fp32 scale: 1 for scope row
  Front front;
  float eps;
  bool pow2_scale;
  bool four_over_six;

  // Output. Either codes and block scales, or values (code times block scale, exact in bf16).
  uint8_t* codes;            // [rows, K/2]
  uint8_t* block_scales;     // linear [rows, K/16], or tiled where row_slots is given
  const int64_t* row_slots;  // [rows] or null: the row's place in the tiled layout
  uint16_t* values;          // [rows, K]
  float* scale;              // [rows / rows_per_scale]
};

// Rows are independent where each has its own scale or amax is given; else one pass finds the
// amax of every scale first. Source: the NVFP4 contract in ffi/numerics.h.
template <class T>
void Quantize(Pool& pool, const QuantizeArgs& args);

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_QUANTIZE_H_
