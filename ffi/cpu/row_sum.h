// The fixed-order sum of squares along a row, shared by RMSNorm and the quantizer's fused front.
#ifndef JAXFP4_CPU_ROW_SUM_H_
#define JAXFP4_CPU_ROW_SUM_H_

#include <cstdint>

#include "ffi/cpu/gemm.h"
#include "ffi/numerics.h"

namespace jaxfp4::cpu {

// 32 strided partial sums in index order, then the binary tree of RowTree.
template <class T>
float RowSumOfSquares(const T* x, int64_t width) {
  float partial[kRowPartials] = {};
  const int64_t whole = width / kRowPartials * kRowPartials;
  for (int64_t k = 0; k < whole; k += kRowPartials) {
    for (int j = 0; j < kRowPartials; ++j) {
      const float value = ToFloat(x[k + j]);
      partial[j] = Add(partial[j], Mul(value, value));
    }
  }
  for (int64_t k = whole; k < width; ++k) {
    const float value = ToFloat(x[k]);
    partial[k - whole] = Add(partial[k - whole], Mul(value, value));
  }
  return RowTree(partial);
}

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_ROW_SUM_H_
