// Attention over a buffer of key slots, each query with a range of slots of its own.
//
//   o[row] = sum over s in [start, end) of softmax(scale * q[row] . k[s]) v[s]
//
// A row is one head of one query. Its keys are taken in blocks of 64 counted from the row's own
// start. Over the blocks, with m, l and o beginning at -inf, 0 and 0:
//
//   s_j = scale * (chain of fused multiply-adds over the head's elements, ascending)
//   m'  = max(m, max_j s_j),  alpha = Exp(m - m'),  p_j = Exp(s_j - m')
//   l   = l * alpha + (sum of p_j, j ascending)
//   o   = chain of fused multiply-adds p_j v_j, j ascending, continued from o * alpha
//
// and o / l is rounded once to T. Slots outside the row's range take no part, not even with a
// weight of zero, and a row whose range has ended is left as it is while other rows go on. So its
// bits depend on the row and on the keys and values of its range alone: not on where the range
// lies in the buffer, on the other rows, or on how many queries one call brings (decode, prefill
// and training are the same op).
//
// An empty range gives o = 0, lse = -inf and no gradient. T is float, or uint16_t for bf16.
#ifndef JAXFP4_CPU_ATTENTION_H_
#define JAXFP4_CPU_ATTENTION_H_

#include <cstdint>

#include "ffi/attention_shape.h"
#include "ffi/cpu/parallel.h"

namespace jaxfp4::cpu {

template <class T>
struct AttentionInput {
  AttentionShape shape;
  const T* q;                // [batch, queries, heads, head_dim]
  const T* k;                // [batch, slots, kv_heads, head_dim]
  const T* v;                // like k
  const int32_t* key_start;  // [batch, queries]; a range is cut to [0, slots)
  const int32_t* key_end;    // [batch, queries]
  float scale;
};

// o is like q; lse [batch, queries, heads] is m + log(l), which the gradient needs.
template <class T>
void Attention(Pool& pool, const AttentionInput<T>& in, T* o, float* lse);

template <class T>
struct AttentionGradArgs {
  AttentionInput<T> in;
  const T* o;        // what Attention returned
  const float* lse;  // what Attention returned
  const T* d_o;      // like q
  T* dq;             // like q
  T* dk;             // like k
  T* dv;             // like k
};

// Deterministic. Sums over queries are in an order of this kernel's own, in fp32.
template <class T>
void AttentionGrad(Pool& pool, const AttentionGradArgs<T>& args);

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_ATTENTION_H_
