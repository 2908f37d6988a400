// The log-probability of a chosen token and the entropy of its distribution, softmax(z) with
// z = logits / temperature over a vocabulary.
//
// The vocabulary is taken in chunks of 512 counted from 0. Of each chunk, with m its largest z:
//
//   s = sum of Exp(z - m),   u = sum of Exp(z - m) (z - m)
//
// along the chunk as in RowTree; the chunks are merged in order. Then
//
//   logprob = z[token] - m - log(s),   entropy = log(s) - u / s,   lse = m + log(s)
//
// A z of -infinity has probability 0 and adds nothing. A token outside the vocabulary has a NaN
// logprob. A row's bits depend on that row (and the head) alone.
#ifndef JAXFP4_CPU_LOGPROB_H_
#define JAXFP4_CPU_LOGPROB_H_

#include <cstdint>

#include "ffi/cpu/parallel.h"

namespace jaxfp4::cpu {

// What both calls take and return; every array is [rows].
struct LogprobArgs {
  int64_t rows, vocabulary;
  const int32_t* tokens;
  const float* temperature;
  float* logprob;
  float* entropy;
  float* lse;
};

// Of given logits [rows, vocabulary].
void LogitsLogprob(Pool& pool, const float* logits, const LogprobArgs& args);

// Of logits = hidden[rows, width] head[vocabulary, width]', each one chain of fused multiply-adds
// (ffi/cpu/gemm.h). They exist a chunk at a time. T is float, or uint16_t for bf16.
template <class T>
void TokenLogprob(Pool& pool, int64_t width, const T* hidden, const T* head,
                  const LogprobArgs& args);

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_LOGPROB_H_
