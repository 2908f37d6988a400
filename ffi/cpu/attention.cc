#include "ffi/cpu/attention.h"

#include <cmath>
#include <limits>
#include <vector>

#include "ffi/cpu/attention_lanes.h"
#include "ffi/cpu/float_values.h"

namespace jaxfp4::cpu {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// One group's state between key blocks.
template <int Lanes>
struct Group {
  float* q_t;  // [head_dim][Lanes]
  float* o_t;  // [head_dim][Lanes]
  alignas(64) float largest[Lanes];
  alignas(64) float sum[Lanes];
  int64_t ends[Lanes];
  int64_t first_row, used_lanes;
};

template <class T, int Lanes>
void BeginGroup(const AttentionInput<T>& in, const RowRun& run, int64_t first_row,
                Group<Lanes>* group) {
  const int64_t dim = in.shape.head_dim;
  group->first_row = first_row;
  group->used_lanes = std::min<int64_t>(Lanes, run.rows() - first_row);
  std::fill_n(group->o_t, dim * Lanes, 0.0f);
  std::fill_n(group->q_t, dim * Lanes, 0.0f);
  std::fill_n(group->largest, Lanes, kMinusInf);
  std::fill_n(group->sum, Lanes, 0.0f);
  for (int64_t lane = 0; lane < group->used_lanes; ++lane) {
    const int64_t row = first_row + lane;
    group->ends[lane] = RangeOf(in, run.batch, run.query(row)).end;
    const T* q = in.q + run.Index(row) * dim;
    for (int64_t d = 0; d < dim; ++d) group->q_t[d * Lanes + lane] = ToFloat(q[d]);
  }
}

// Scores become weights: s_t[key][lane] = Exp(scale * s_t - largest), 0 outside the lane's count.
// Updates largest and sum, and fills alpha, by which what was summed before has to shrink.
template <int Lanes>
void Weights(const LaneCounts<Lanes>& keys, float scale, float* s_t, float* largest, float* sum,
             float* alpha) {
  alignas(64) float block_largest[Lanes], block_sum[Lanes];
  for (int lane = 0; lane < Lanes; ++lane) {
    block_largest[lane] = largest[lane];
    block_sum[lane] = 0.0f;
  }
  for (int32_t key = 0; key < keys.most; ++key) {
    float* s = s_t + key * Lanes;
    for (int lane = 0; lane < Lanes; ++lane) {
      const float score = key < keys.counts[lane] ? Mul(s[lane], scale) : kMinusInf;
      s[lane] = score;
      block_largest[lane] = score > block_largest[lane] ? score : block_largest[lane];
    }
  }
  // Where every score so far is -infinity there is nothing to subtract: the weights are 0.
  alignas(64) float base[Lanes];
  for (int lane = 0; lane < Lanes; ++lane) {
    base[lane] = block_largest[lane] == kMinusInf ? 0.0f : block_largest[lane];
  }
  for (int32_t key = 0; key < keys.most; ++key) {
    float* s = s_t + key * Lanes;
    for (int lane = 0; lane < Lanes; ++lane) {
      const float weight = Exp(Sub(s[lane], base[lane]));
      s[lane] = key < keys.counts[lane] ? weight : 0.0f;
      block_sum[lane] = Add(block_sum[lane], s[lane]);
    }
  }
  for (int lane = 0; lane < Lanes; ++lane) {
    const float shrink = Exp(Sub(largest[lane], base[lane]));
    alpha[lane] = keys.counts[lane] > 0 ? shrink : 1.0f;
    sum[lane] = Add(Mul(sum[lane], alpha[lane]), block_sum[lane]);
    largest[lane] = block_largest[lane];
  }
}

template <int Lanes>
void AddBlock(int64_t dim, float scale, int64_t begin, const float* k, const float* v, float* s_t,
              Group<Lanes>* group) {
  constexpr int kVectors = Lanes / 8;
  const LaneCounts<Lanes> keys(group->ends, group->used_lanes, begin);
  if (keys.most == 0) return;
  std::fill_n(s_t, keys.most * Lanes, 0.0f);
  LaneProduct<kVectors>(keys.most, dim, k, dim, 1, group->q_t, Lanes, s_t, Lanes, dim, keys.counts);
  alignas(64) float alpha[Lanes];
  Weights<Lanes>(keys, scale, s_t, group->largest, group->sum, alpha);
  for (int64_t d = 0; d < dim; ++d) {
    for (int lane = 0; lane < Lanes; ++lane) {
      group->o_t[d * Lanes + lane] = Mul(group->o_t[d * Lanes + lane], alpha[lane]);
    }
  }
  LaneProduct<kVectors>(dim, keys.most, v, 1, dim, s_t, Lanes, group->o_t, Lanes, keys.least,
                        keys.counts);
}

template <class T, int Lanes>
void FinishGroup(const AttentionInput<T>& in, const RowRun& run, const Group<Lanes>& group, T* o,
                 float* lse) {
  const int64_t dim = in.shape.head_dim;
  for (int64_t lane = 0; lane < group.used_lanes; ++lane) {
    const int64_t index = run.Index(group.first_row + lane);
    const bool empty = group.ends[lane] <= run.start;
    for (int64_t d = 0; d < dim; ++d) {
      const float mean = Div(group.o_t[d * Lanes + lane], group.sum[lane]);
      StoreFloat(empty ? 0.0f : mean, &o[index * dim + d]);
    }
    const float log_sum = static_cast<float>(std::log(static_cast<double>(group.sum[lane])));
    lse[index] = empty ? kMinusInf : Add(group.largest[lane], log_sum);
  }
}

template <class T, int Lanes>
void RunTile(const AttentionInput<T>& in, int64_t batch, int64_t kv_head, int64_t first_query, T* o,
             float* lse) {
  const int64_t dim = in.shape.head_dim;
  const int64_t last_query = std::min(first_query + QueriesPerTile(in.shape), in.shape.queries);
  const int64_t rows = (last_query - first_query) * in.shape.heads_per_kv();
  const int64_t most_groups = (rows + Lanes - 1) / Lanes;
  thread_local Scratch scratch;
  float* k = scratch.Get(2 * kKeyBlock * dim + kKeyBlock * Lanes + most_groups * 2 * dim * Lanes);
  float* v = k + kKeyBlock * dim;
  float* s_t = v + kKeyBlock * dim;
  float* states = s_t + kKeyBlock * Lanes;
  thread_local std::vector<Group<Lanes>> groups;
  groups.resize(most_groups);
  ForEachRun(in, batch, kv_head, first_query, last_query, [&](const RowRun& run) {
    const int64_t count = (run.rows() + Lanes - 1) / Lanes;
    for (int64_t g = 0; g < count; ++g) {
      groups[g].q_t = states + g * 2 * dim * Lanes;
      groups[g].o_t = groups[g].q_t + dim * Lanes;
      BeginGroup<T, Lanes>(in, run, g * Lanes, &groups[g]);
    }
    for (int64_t begin = run.start; begin < run.largest_end; begin += kKeyBlock) {
      const int64_t keys = std::min(kKeyBlock, run.largest_end - begin);
      LoadSlots(in.shape, in.k, batch, kv_head, begin, keys, k);
      LoadSlots(in.shape, in.v, batch, kv_head, begin, keys, v);
      for (int64_t g = 0; g < count; ++g) {
        AddBlock<Lanes>(dim, in.scale, begin, k, v, s_t, &groups[g]);
      }
    }
    for (int64_t g = 0; g < count; ++g) FinishGroup<T, Lanes>(in, run, groups[g], o, lse);
  });
}

}  // namespace

template <class T>
void Attention(Pool& pool, const AttentionInput<T>& in, T* o, float* lse) {
  const AttentionShape& shape = in.shape;
  const int64_t queries = QueriesPerTile(shape);
  const int64_t tiles = (shape.queries + queries - 1) / queries;
  const bool few_rows = shape.queries * shape.heads_per_kv() <= 8;
  // Later queries have more keys to come: they go first, so that the threads end together.
  ParallelFor(pool, shape.batch * shape.kv_heads * tiles, [&](int64_t task) {
    const int64_t tile = tiles - 1 - task / (shape.batch * shape.kv_heads);
    const int64_t batch = task % (shape.batch * shape.kv_heads) / shape.kv_heads;
    const int64_t kv_head = task % shape.kv_heads;
    if (few_rows) {
      RunTile<T, 8>(in, batch, kv_head, tile * queries, o, lse);
    } else {
      RunTile<T, 16>(in, batch, kv_head, tile * queries, o, lse);
    }
  });
}

template void Attention<float>(Pool&, const AttentionInput<float>&, float*, float*);
template void Attention<uint16_t>(Pool&, const AttentionInput<uint16_t>&, uint16_t*, float*);

}  // namespace jaxfp4::cpu
