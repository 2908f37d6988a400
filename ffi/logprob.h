// The log-probability of a chosen token and the entropy of its distribution, softmax(z) with
// z = logits / temperature over a vocabulary: the steps for one row, one text for host and device.
//
// The vocabulary is taken in blocks of 512 counted from 0. Of each block, with m its largest z:
//
//   s = sum of Exp(z - m),   u = sum of Exp(z - m) (z - m)
//
// along the block as in RowTree; the blocks are merged in order. Then
//
//   logprob = z[token] - m - log(s),   entropy = log(s) - u / s,   lse = m + log(s)
//
// A z of -infinity has probability 0 and adds nothing. A token outside the vocabulary has a NaN
// logprob. A row's bits depend on that row (and the head) alone.
#ifndef JAXFP4_LOGPROB_H_
#define JAXFP4_LOGPROB_H_

#include <cmath>
#include <cstdint>

#include "ffi/numerics.h"

namespace jaxfp4 {

constexpr int kVocabularyBlock = 512;
constexpr float kMinusInf = -INFINITY;

// The m, s and u of a part of the vocabulary. s is 0 where every z is -infinity.
struct Statistics {
  float largest, sum, weighted;
};

// What a row has come to after some blocks: an operand and a result of logprob_chunk.
struct LogprobState {
  Statistics all;
  float token_z;  // NaN until the token's block
};
static_assert(sizeof(LogprobState) == 4 * sizeof(float));

JAXFP4_INLINE LogprobState EmptyLogprobState() {
  return {{kMinusInf, 0.0f, 0.0f}, FromBits(kNanBits)};
}

// What z is measured from in a block with this largest value. With no finite z, 0 keeps -infinity
// from meeting itself.
JAXFP4_INLINE float BlockBase(float largest) { return largest == kMinusInf ? 0.0f : largest; }

// A value's term of u.
JAXFP4_INLINE float WeightedTerm(float exponential, float offset) {
  return exponential == 0.0f ? 0.0f : Mul(exponential, offset);
}

// `part` as seen from a largest value that is not below its own: shift = its own - that one and
// scale = Exp(shift).
JAXFP4_INLINE Statistics Rebase(const Statistics& part, float largest, float shift, float scale) {
  // A part that is too small to add anything still adds its NaN.
  if (scale == 0.0f) return {largest, Mul(part.sum, 0.0f), Mul(part.weighted, 0.0f)};
  return {largest, Mul(part.sum, scale), Mul(Add(part.weighted, Mul(part.sum, shift)), scale)};
}

JAXFP4_INLINE Statistics Rebase(const Statistics& part, float largest) {
  const float shift = Sub(part.largest, largest);
  return Rebase(part, largest, shift, Exp(shift));
}

JAXFP4_INLINE Statistics Merge(const Statistics& a, const Statistics& b) {
  if (a.sum == 0.0f) return b;
  if (b.sum == 0.0f) return a;
  const float largest = a.largest > b.largest ? a.largest : b.largest;
  const Statistics left = Rebase(a, largest), right = Rebase(b, largest);
  return {largest, Add(left.sum, right.sum), Add(left.weighted, right.weighted)};
}

struct LogprobResult {
  float logprob, entropy, lse;
};

JAXFP4_INLINE LogprobResult FinishLogprob(const LogprobState& state) {
  const Statistics& all = state.all;
  // In double: rounded to fp32 it is the same number whoever wrote the logarithm.
  const float log_sum = static_cast<float>(log(static_cast<double>(all.sum)));
  return {Sub(Sub(state.token_z, all.largest), log_sum), Sub(log_sum, Div(all.weighted, all.sum)),
          Add(all.largest, log_sum)};
}

}  // namespace jaxfp4

#endif  // JAXFP4_LOGPROB_H_
