#include "ffi/cpu/logprob.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ffi/cpu/gemm.h"
#include "ffi/cpu/row_reductions.h"
#include "ffi/numerics.h"

namespace jaxfp4::cpu {
namespace {

constexpr int64_t kChunk = 512;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// The m, s and u of a part of the vocabulary. s is 0 where every z is -infinity.
struct Statistics {
  float largest = kMinusInf;
  float sum = 0.0f;
  float weighted = 0.0f;
};

// Of `count` <= kChunk values z.
Statistics Measure(const float* z, int64_t count) {
  float exponential[kChunk], weighted[kChunk];
  const float largest = RowMax(z, count);
  // With no finite z, 0 in place of the largest keeps -infinity from meeting itself.
  const float base = largest == kMinusInf ? 0.0f : largest;
  for (int64_t i = 0; i < count; ++i) {
    const float offset = Sub(z[i], base);
    exponential[i] = Exp(offset);
    weighted[i] = exponential[i] == 0.0f ? 0.0f : Mul(exponential[i], offset);
  }
  return {largest, RowSum(exponential, count), RowSum(weighted, count)};
}

// `part` as seen from a largest value that is not below its own.
Statistics Rebase(const Statistics& part, float largest) {
  const float shift = Sub(part.largest, largest);
  const float scale = Exp(shift);
  if (scale == 0.0f) return {largest, 0.0f, 0.0f};
  return {largest, Mul(part.sum, scale), Mul(Add(part.weighted, Mul(part.sum, shift)), scale)};
}

Statistics Merge(const Statistics& a, const Statistics& b) {
  if (a.sum == 0.0f) return b;
  if (b.sum == 0.0f) return a;
  const float largest = a.largest > b.largest ? a.largest : b.largest;
  const Statistics left = Rebase(a, largest), right = Rebase(b, largest);
  return {largest, Add(left.sum, right.sum), Add(left.weighted, right.weighted)};
}

inline float Log(float x) { return static_cast<float>(std::log(static_cast<double>(x))); }

void Finish(const LogprobArgs& args, int64_t row, const Statistics& all, float token_z) {
  const float log_sum = Log(all.sum);
  const int64_t token = args.tokens[row];
  const bool known = token >= 0 && token < args.vocabulary;
  args.logprob[row] = known ? Sub(Sub(token_z, all.largest), log_sum) : FromBits(kNanBits);
  args.entropy[row] = Sub(log_sum, Div(all.weighted, all.sum));
  args.lse[row] = Add(all.largest, log_sum);
}

// z of one row's chunk that begins at `first`. Notes the token's z where it is among them.
void Temper(const LogprobArgs& args, int64_t row, int64_t first, const float* logits, int64_t count,
            float* z, float* token_z) {
  const float temperature = args.temperature[row];
  for (int64_t i = 0; i < count; ++i) z[i] = Div(logits[i], temperature);
  const int64_t token = args.tokens[row] - first;
  if (token >= 0 && token < count) *token_z = z[token];
}

}  // namespace

void LogitsLogprob(Pool& pool, const float* logits, const LogprobArgs& args) {
  const int64_t vocabulary = args.vocabulary;
  const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(vocabulary, 1));
  ParallelRanges(pool, args.rows, grain, [&](int64_t begin, int64_t end) {
    float z[kChunk];
    for (int64_t row = begin; row < end; ++row) {
      Statistics all;
      float token_z = 0.0f;
      for (int64_t first = 0; first < vocabulary; first += kChunk) {
        const int64_t count = std::min(kChunk, vocabulary - first);
        Temper(args, row, first, logits + row * vocabulary + first, count, z, &token_z);
        all = Merge(all, Measure(z, count));
      }
      Finish(args, row, all, token_z);
    }
  });
}

template <class T>
void TokenLogprob(Pool& pool, int64_t width, const T* hidden, const T* head,
                  const LogprobArgs& args) {
  constexpr int64_t kRows = 96;  // rows that share one decoding of a chunk of the head
  const int64_t chunks = (args.vocabulary + kChunk - 1) / kChunk;
  const int64_t row_tiles = (args.rows + kRows - 1) / kRows;
  std::vector<Statistics> parts(args.rows * chunks);
  std::vector<float> token_z(args.rows);
  const PackRows<kTileRows, RowMajor<T>> pack_hidden{{hidden, width}};
  const PackRows<kTileColumns, RowMajor<T>> pack_head{{head, width}};
  ParallelFor(pool, row_tiles * chunks, [&](int64_t task) {
    const int64_t chunk = task / row_tiles, row = task % row_tiles * kRows;
    const int64_t first = chunk * kChunk;
    const Tile tile = {row,   std::min(kRows, args.rows - row),
                       first, std::min(kChunk, args.vocabulary - first),
                       0,     width};
    ComputeTile(tile, pack_hidden, pack_head,
                [&](int64_t i, int64_t column, int64_t count, float* logits) {
                  Temper(args, i, column, logits, count, logits, &token_z[i]);
                  parts[i * chunks + chunk] = Measure(logits, count);
                });
  });
  ParallelRanges(pool, args.rows, 256, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Statistics all;
      for (int64_t c = 0; c < chunks; ++c) all = Merge(all, parts[row * chunks + c]);
      Finish(args, row, all, token_z[row]);
    }
  });
}

template void TokenLogprob<float>(Pool&, int64_t, const float*, const float*, const LogprobArgs&);
template void TokenLogprob<uint16_t>(Pool&, int64_t, const uint16_t*, const uint16_t*,
                                     const LogprobArgs&);

}  // namespace jaxfp4::cpu
