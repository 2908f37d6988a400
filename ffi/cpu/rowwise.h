// Ops along one row, in an order of their own: a row's bits depend on that row alone.
//
// T is float, or uint16_t for bf16. Values are read as fp32, every step is one fp32 operation of
// ffi/numerics.h, and a result is rounded to T once.
#ifndef JAXFP4_CPU_ROWWISE_H_
#define JAXFP4_CPU_ROWWISE_H_

#include <cstdint>

#include "ffi/cpu/parallel.h"

namespace jaxfp4::cpu {

// y[rows, width] = x * (1 / sqrt(mean(x^2) + eps)) * weight[width]
template <class T>
void RmsNormRows(Pool& pool, int64_t rows, int64_t width, const T* x, const float* weight,
                 float eps, T* y);

// y[rows, width] = silu(gate) * up, where x[rows, 2 * width] holds the gates first.
template <class T>
void SwiGluRows(Pool& pool, int64_t rows, int64_t width, const T* x, T* y);

// Each head is normalised as in RmsNormRows (not, where weight is null) and its two halves are
// rotated by position * inv_freq. Nothing is rounded between the two.
template <class T>
struct QkNormRopeArgs {
  int64_t tokens, heads, head_dim;
  const T* x;                // [tokens, heads, head_dim]
  const float* weight;       // [head_dim] or null
  const int32_t* positions;  // [tokens]
  const float* inv_freq;     // [head_dim / 2]
  float eps;
  T* y;  // [tokens, heads, head_dim]
};

template <class T>
void QkNormRope(Pool& pool, const QkNormRopeArgs<T>& args);

// The k largest of softmax(logits), largest first, ties to the lowest index; NaN sorts last.
struct RouterTopKArgs {
  int64_t rows, num_experts, k;
  const float* logits;           // [rows, num_experts]
  const int32_t* given_experts;  // [rows, k] or null: the choice is made here
  bool norm_topk_prob;           // divide by the k weights' sum, added in rank order
  float* weights;                // [rows, k]; 0 for a given expert outside [0, num_experts)
  int32_t* experts;              // [rows, k]
};

void RouterTopK(Pool& pool, const RouterTopKArgs& args);

// out[rows, width] = sum over j of weights[rows, k] * y[slots[rows, k]], j ascending. A slot
// outside [0, y_rows) adds nothing.
template <class T>
struct CombineExpertsArgs {
  int64_t y_rows, width, rows, k;
  const T* y;            // [y_rows, width]
  const float* weights;  // [rows, k]
  const int32_t* slots;  // [rows, k]
};

template <class T>
void CombineExperts(Pool& pool, const CombineExpertsArgs<T>& args, T* out);

// dy[y_rows, width] and dweights[rows, k] from d_out[rows, width]. A slot that is used several
// times sums its uses in row order.
template <class T>
void CombineExpertsGrad(Pool& pool, const CombineExpertsArgs<T>& args, const T* d_out, T* dy,
                        float* dweights);

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_ROWWISE_H_
