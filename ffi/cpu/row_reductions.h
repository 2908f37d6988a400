// The maximum and the sum along a row of fp32 values, in the order of RowTree.
#ifndef JAXFP4_CPU_ROW_REDUCTIONS_H_
#define JAXFP4_CPU_ROW_REDUCTIONS_H_

#include <cstdint>
#include <limits>

#include "ffi/cpu/float_values.h"
#include "ffi/numerics.h"

namespace jaxfp4::cpu {

// -infinity for an empty row. NaN is passed over: a sum of exponentials finds it.
inline float RowMax(const float* x, int64_t width) {
  float partial[kRowPartials];
  for (float& p : partial) p = -std::numeric_limits<float>::infinity();
  const int64_t whole = width / kRowPartials * kRowPartials;
  for (int64_t k = 0; k < whole; k += kRowPartials) {
    for (int j = 0; j < kRowPartials; ++j) {
      partial[j] = x[k + j] > partial[j] ? x[k + j] : partial[j];
    }
  }
  for (int64_t k = whole; k < width; ++k) {
    partial[0] = x[k] > partial[0] ? x[k] : partial[0];
  }
  for (int j = 1; j < kRowPartials; ++j) {
    partial[0] = partial[j] > partial[0] ? partial[j] : partial[0];
  }
  return partial[0];
}

inline float RowSum(const float* x, int64_t width) {
  float partial[kRowPartials] = {};
  const int64_t whole = width / kRowPartials * kRowPartials;
  for (int64_t k = 0; k < whole; k += kRowPartials) {
    for (int j = 0; j < kRowPartials; ++j) partial[j] = Add(partial[j], x[k + j]);
  }
  for (int64_t k = whole; k < width; ++k) partial[k - whole] = Add(partial[k - whole], x[k]);
  return RowTree(partial);
}

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

#endif  // JAXFP4_CPU_ROW_REDUCTIONS_H_
