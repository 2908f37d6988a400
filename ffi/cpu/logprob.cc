#include "ffi/cpu/logprob.h"

#include <algorithm>
#include <vector>

#include "ffi/cpu/gemm.h"
#include "ffi/cpu/row_reductions.h"
#include "ffi/numerics.h"

namespace jaxfp4::cpu {
namespace {

// Of `count` <= kVocabularyBlock values z.
Statistics Measure(const float* z, int64_t count) {
  float exponential[kVocabularyBlock], weighted[kVocabularyBlock];
  const float largest = RowMax(z, count);
  const float base = BlockBase(largest);
  for (int64_t i = 0; i < count; ++i) {
    const float offset = Sub(z[i], base);
    exponential[i] = Exp(offset);
    weighted[i] = WeightedTerm(exponential[i], offset);
  }
  return {largest, RowSum(exponential, count), RowSum(weighted, count)};
}

// z of one row's block that begins at `first`. Notes the token's z where it is among them.
void Temper(const LogprobArgs& args, int64_t row, int64_t first, const float* logits, int64_t count,
            float* z, float* token_z) {
  const float temperature = args.temperature[row];
  for (int64_t i = 0; i < count; ++i) z[i] = Div(logits[i], temperature);
  const int64_t token = args.tokens[row] - first;
  if (token >= 0 && token < count) *token_z = z[token];
}

void Finish(const LogprobArgs& args, int64_t row, const LogprobState& state) {
  const LogprobResult result = FinishLogprob(state);
  args.logprob[row] = result.logprob;
  args.entropy[row] = result.entropy;
  args.lse[row] = result.lse;
}

// Calls with_row(row, state) for each row with the state after its logits; load(row) is the one
// before.
template <class Load, class WithRow>
void FoldLogits(Pool& pool, const float* logits, const LogprobArgs& args, const Load& load,
                const WithRow& with_row) {
  const int64_t vocabulary = args.vocabulary;
  const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(vocabulary, 1));
  ParallelRanges(pool, args.rows, grain, [&](int64_t begin, int64_t end) {
    float z[kVocabularyBlock];
    for (int64_t row = begin; row < end; ++row) {
      LogprobState state = load(row);
      for (int64_t first = 0; first < vocabulary; first += kVocabularyBlock) {
        const int64_t count = std::min<int64_t>(kVocabularyBlock, vocabulary - first);
        Temper(args, row, first, logits + row * vocabulary + first, count, z, &state.token_z);
        state.all = Merge(state.all, Measure(z, count));
      }
      with_row(row, state);
    }
  });
}

}  // namespace

void LogitsLogprob(Pool& pool, const float* logits, const LogprobArgs& args) {
  FoldLogits(
      pool, logits, args, [](int64_t) { return EmptyLogprobState(); },
      [&](int64_t row, const LogprobState& state) { Finish(args, row, state); });
}

void LogprobChunk(Pool& pool, const float* logits, const LogprobArgs& args,
                  const LogprobState* state, LogprobState* new_state) {
  FoldLogits(
      pool, logits, args, [&](int64_t row) { return state[row]; },
      [&](int64_t row, const LogprobState& after) {
        new_state[row] = after;
        Finish(args, row, after);
      });
}

template <class T>
void TokenLogprob(Pool& pool, int64_t width, const T* hidden, const T* head,
                  const LogprobArgs& args) {
  constexpr int64_t kRows = 96;  // rows that share one decoding of a block of the head
  const int64_t blocks = (args.vocabulary + kVocabularyBlock - 1) / kVocabularyBlock;
  const int64_t row_tiles = (args.rows + kRows - 1) / kRows;
  std::vector<Statistics> parts(args.rows * blocks);
  std::vector<float> token_z(args.rows, EmptyLogprobState().token_z);
  const PackRows<kTileRows, RowMajor<T>> pack_hidden{{hidden, width}};
  const PackRows<kTileColumns, RowMajor<T>> pack_head{{head, width}};
  ParallelFor(pool, row_tiles * blocks, [&](int64_t task) {
    const int64_t block = task / row_tiles, row = task % row_tiles * kRows;
    const int64_t first = block * kVocabularyBlock;
    const Tile tile = {row,   std::min(kRows, args.rows - row),
                       first, std::min<int64_t>(kVocabularyBlock, args.vocabulary - first),
                       0,     width};
    ComputeTile(tile, pack_hidden, pack_head,
                [&](int64_t i, int64_t column, int64_t count, float* logits) {
                  Temper(args, i, column, logits, count, logits, &token_z[i]);
                  parts[i * blocks + block] = Measure(logits, count);
                });
  });
  ParallelRanges(pool, args.rows, 256, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      LogprobState state = EmptyLogprobState();
      state.token_z = token_z[row];
      for (int64_t b = 0; b < blocks; ++b) {
        state.all = Merge(state.all, parts[row * blocks + b]);
      }
      Finish(args, row, state);
    }
  });
}

template void TokenLogprob<float>(Pool&, int64_t, const float*, const float*, const LogprobArgs&);
template void TokenLogprob<uint16_t>(Pool&, int64_t, const uint16_t*, const uint16_t*,
                                     const LogprobArgs&);

}  // namespace jaxfp4::cpu
