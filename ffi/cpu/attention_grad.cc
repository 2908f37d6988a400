// The gradient of attention. With p = Exp(s - lse) of the row's own keys:
//
//   dv[key] = sum over rows p do          delta[row] = do . o
//   dp      = do . v                      ds = p * (dp - delta) * scale
//   dq[row] = sum over keys ds k          dk[key] = sum over rows ds q
//
// One task does a whole KV head of one batch element, so that no two tasks add to one sum.
#include <cmath>
#include <vector>

#include "ffi/cpu/attention.h"
#include "ffi/cpu/attention_lanes.h"
#include "ffi/cpu/float_values.h"

namespace jaxfp4::cpu {
namespace {

constexpr int kLanes = 16;
constexpr int kVectors = kLanes / 8;

// One group's rows. A row with an empty range is read as zeros, and so is an unused lane.
struct Group {
  float* q_t;    // [head_dim][kLanes]
  float* d_o_t;  // [head_dim][kLanes]
  float* dq_t;   // [head_dim][kLanes]
  float* q;      // [kLanes][padded head_dim]
  float* d_o;    // [kLanes][padded head_dim]
  alignas(64) float lse[kLanes];
  alignas(64) float delta[kLanes];
  int64_t ends[kLanes];
  int64_t first_row, used_lanes;
};

// Rows of the fp32 sums and of q and do are padded to whole strips of kLanes columns.
inline int64_t PaddedDim(int64_t head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

inline int64_t GroupFloats(int64_t head_dim) {
  return 3 * head_dim * kLanes + 2 * PaddedDim(head_dim) * kLanes;
}

template <class T>
void BeginGroup(const AttentionGradArgs<T>& args, const RowRun& run, int64_t first_row,
                float* memory, Group* group) {
  const int64_t dim = run.shape.head_dim, padded = PaddedDim(dim);
  group->first_row = first_row;
  group->used_lanes = std::min<int64_t>(kLanes, run.rows() - first_row);
  std::fill_n(memory, GroupFloats(dim), 0.0f);
  group->q_t = memory;
  group->d_o_t = group->q_t + dim * kLanes;
  group->dq_t = group->d_o_t + dim * kLanes;
  group->q = group->dq_t + dim * kLanes;
  group->d_o = group->q + padded * kLanes;
  std::fill_n(group->lse, kLanes, 0.0f);
  std::fill_n(group->delta, kLanes, 0.0f);
  for (int64_t lane = 0; lane < group->used_lanes; ++lane) {
    const int64_t row = first_row + lane, index = run.Index(row);
    group->ends[lane] = RangeOf(args.in, run.batch, run.query(row)).end;
    if (group->ends[lane] <= run.start) continue;
    group->lse[lane] = args.lse[index];
    for (int64_t d = 0; d < dim; ++d) {
      const float q = ToFloat(args.in.q[index * dim + d]);
      const float d_o = ToFloat(args.d_o[index * dim + d]);
      group->q_t[d * kLanes + lane] = group->q[lane * padded + d] = q;
      group->d_o_t[d * kLanes + lane] = group->d_o[lane * padded + d] = d_o;
      group->delta[lane] += d_o * ToFloat(args.o[index * dim + d]);
    }
  }
}

// Turns scores s_t into weights p, and d_p_t into the scores' gradients.
void ScoreGradients(const LaneCounts<kLanes>& keys, const Group& group, float scale, float* s_t,
                    float* d_p_t) {
  for (int32_t key = 0; key < keys.most; ++key) {
    float* s = s_t + key * kLanes;
    float* d = d_p_t + key * kLanes;
    for (int lane = 0; lane < kLanes; ++lane) {
      const bool used = key < keys.counts[lane];
      const float weight = Exp(s[lane] * scale - group.lse[lane]);
      const float gradient = weight * (d[lane] - group.delta[lane]) * scale;
      s[lane] = used ? weight : 0.0f;
      d[lane] = used ? gradient : 0.0f;
    }
  }
}

struct KeySums {
  float* dk;  // [slots][padded head_dim]
  float* dv;
};

// sums[key] += weights[key][lane] * rows[lane] for the lanes whose range holds the key, over the
// keys that some lanes do not see. A weight of 0 would not do for those: 0 times infinity is NaN.
void AddPartlySeenKeys(const LaneCounts<kLanes>& keys, const float* weights, const float* rows,
                       int64_t padded, float* sums) {
  for (int64_t key = keys.least; key < keys.most; ++key) {
    float* sum = sums + key * padded;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (key >= keys.counts[lane]) continue;
      const float weight = weights[key * kLanes + lane];
      const float* row = rows + lane * padded;
      for (int64_t d = 0; d < padded; ++d) sum[d] += weight * row[d];
    }
  }
}

void AddBlock(int64_t dim, float scale, int64_t begin, const float* k, const float* v, float* s_t,
              float* d_p_t, const KeySums& sums, Group* group) {
  const int64_t padded = PaddedDim(dim);
  const LaneCounts<kLanes> keys(group->ends, group->used_lanes, begin);
  if (keys.most == 0) return;
  std::fill_n(s_t, keys.most * kLanes, 0.0f);
  std::fill_n(d_p_t, keys.most * kLanes, 0.0f);
  LaneProduct<kVectors>(keys.most, dim, k, dim, 1, group->q_t, kLanes, s_t, kLanes, dim,
                        keys.counts);
  LaneProduct<kVectors>(keys.most, dim, v, dim, 1, group->d_o_t, kLanes, d_p_t, kLanes, dim,
                        keys.counts);
  ScoreGradients(keys, *group, scale, s_t, d_p_t);
  LaneProduct<kVectors>(dim, keys.most, k, 1, dim, d_p_t, kLanes, group->dq_t, kLanes, keys.least,
                        keys.counts);
  // Keys that every lane attends to; then those of some lanes, each lane for itself.
  for (int64_t d = 0; d < dim; d += kLanes) {
    LaneProduct<kVectors>(keys.least, kLanes, s_t, kLanes, 1, group->d_o + d, padded,
                          sums.dv + begin * padded + d, padded, kLanes, keys.counts);
    LaneProduct<kVectors>(keys.least, kLanes, d_p_t, kLanes, 1, group->q + d, padded,
                          sums.dk + begin * padded + d, padded, kLanes, keys.counts);
  }
  AddPartlySeenKeys(keys, s_t, group->d_o, padded, sums.dv + begin * padded);
  AddPartlySeenKeys(keys, d_p_t, group->q, padded, sums.dk + begin * padded);
}

template <class T>
void RunKvHead(const AttentionGradArgs<T>& args, int64_t batch, int64_t kv_head) {
  const AttentionInput<T>& in = args.in;
  const AttentionShape& shape = in.shape;
  const int64_t dim = shape.head_dim, padded = PaddedDim(dim);
  const int64_t queries = std::min(QueriesPerTile(shape), shape.queries);
  const int64_t most_groups = (queries * shape.heads_per_kv() + kLanes - 1) / kLanes;
  thread_local Scratch scratch;
  float* k = scratch.Get(2 * kKeyBlock * dim + 2 * kKeyBlock * kLanes +
                         most_groups * GroupFloats(dim) + 2 * shape.slots * padded);
  float* v = k + kKeyBlock * dim;
  float* s_t = v + kKeyBlock * dim;
  float* d_p_t = s_t + kKeyBlock * kLanes;
  float* states = d_p_t + kKeyBlock * kLanes;
  const KeySums sums = {states + most_groups * GroupFloats(dim),
                        states + most_groups * GroupFloats(dim) + shape.slots * padded};
  std::fill_n(sums.dk, 2 * shape.slots * padded, 0.0f);
  std::vector<Group> groups(most_groups);
  for (int64_t first = 0; first < shape.queries; first += queries) {
    const int64_t last = std::min(first + queries, shape.queries);
    ForEachRun(in, batch, kv_head, first, last, [&](const RowRun& run) {
      const int64_t count = (run.rows() + kLanes - 1) / kLanes;
      for (int64_t g = 0; g < count; ++g) {
        BeginGroup(args, run, g * kLanes, states + g * GroupFloats(dim), &groups[g]);
      }
      for (int64_t begin = run.start; begin < run.largest_end; begin += kKeyBlock) {
        const int64_t keys = std::min(kKeyBlock, run.largest_end - begin);
        LoadSlots(shape, in.k, batch, kv_head, begin, keys, k);
        LoadSlots(shape, in.v, batch, kv_head, begin, keys, v);
        for (int64_t g = 0; g < count; ++g) {
          AddBlock(dim, in.scale, begin, k, v, s_t, d_p_t, sums, &groups[g]);
        }
      }
      for (int64_t g = 0; g < count; ++g) {
        for (int64_t lane = 0; lane < groups[g].used_lanes; ++lane) {
          T* dq = args.dq + run.Index(g * kLanes + lane) * dim;
          for (int64_t d = 0; d < dim; ++d) StoreFloat(groups[g].dq_t[d * kLanes + lane], &dq[d]);
        }
      }
    });
  }
  for (int64_t slot = 0; slot < shape.slots; ++slot) {
    const int64_t index = ((batch * shape.slots + slot) * shape.kv_heads + kv_head) * dim;
    for (int64_t d = 0; d < dim; ++d) {
      StoreFloat(sums.dk[slot * padded + d], &args.dk[index + d]);
      StoreFloat(sums.dv[slot * padded + d], &args.dv[index + d]);
    }
  }
}

}  // namespace

template <class T>
void AttentionGrad(Pool& pool, const AttentionGradArgs<T>& args) {
  const int64_t kv_heads = args.in.shape.kv_heads;
  ParallelFor(pool, args.in.shape.batch * kv_heads,
              [&](int64_t task) { RunKvHead(args, task / kv_heads, task % kv_heads); });
}

template void AttentionGrad<float>(Pool&, const AttentionGradArgs<float>&);
template void AttentionGrad<uint16_t>(Pool&, const AttentionGradArgs<uint16_t>&);

}  // namespace jaxfp4::cpu
