// The log-probability of a chosen token and the entropy of its distribution on the CPU, as
// ffi/logprob.h states them.
#ifndef JAXFP4_CPU_LOGPROB_H_
#define JAXFP4_CPU_LOGPROB_H_

#include <cstdint>

#include "ffi/cpu/parallel.h"
#include "ffi/logprob.h"

namespace jaxfp4::cpu {

// What all calls take and return; every array is [rows].
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

// Takes each row on from `state` over a chunk of the vocabulary: logits [rows, vocabulary] and
// tokens are counted from the chunk's first, a multiple of kVocabularyBlock. The results are those
// of the vocabulary up to the chunk's end.
void LogprobChunk(Pool& pool, const float* logits, const LogprobArgs& args,
                  const LogprobState* state, LogprobState* new_state);

// Of logits = hidden[rows, width] head[vocabulary, width]', each one chain of fused multiply-adds
// (ffi/cpu/gemm.h). They exist a block at a time. T is float, or uint16_t for bf16.
template <class T>
void TokenLogprob(Pool& pool, int64_t width, const T* hidden, const T* head,
                  const LogprobArgs& args);

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_LOGPROB_H_
