// Launches of logits_logprob and logprob_chunk: ffi/logprob.h's steps, in its order.
#ifndef JAXFP4_CUDA_LOGPROB_H_
#define JAXFP4_CUDA_LOGPROB_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/logprob.h"

namespace jaxfp4::cuda {

// A thread block keeps the statistics of every block of a row's vocabulary, 12 bytes each.
constexpr int64_t kLargestVocabulary = 2000000;

struct LogprobArgs {
  int64_t rows, vocabulary;  // vocabulary at most kLargestVocabulary
  const float* logits;       // [rows, vocabulary]
  // Counted from the first of the logits, which is a multiple of kVocabularyBlock.
  const int32_t* tokens;      // [rows]
  const float* temperature;   // [rows]
  const LogprobState* state;  // [rows], of the vocabulary before the logits; null: there is none
  LogprobState* new_state;    // [rows] or null
  float* logprob;             // [rows], as are the others
  float* entropy;
  float* lse;
};

cudaError_t FoldLogits(cudaStream_t stream, const LogprobArgs& args);

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_LOGPROB_H_
