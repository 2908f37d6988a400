// What attention's forward and backward share: rows (heads of queries) side by side in the lanes of
// vectors, so that every row does its own chain of operations, in its own lane.
//
// A group is 8 or 16 rows of one KV head with equal key_start. Matrices of a group are stored with
// the lanes innermost: q_t[d][lane], s_t[key][lane].
#ifndef JAXFP4_CPU_ATTENTION_LANES_H_
#define JAXFP4_CPU_ATTENTION_LANES_H_

#include <algorithm>
#include <cstdint>

#include "ffi/cpu/attention.h"
#include "ffi/cpu/float_values.h"
#include "ffi/cpu/gemm.h"
#include "ffi/numerics.h"

namespace jaxfp4::cpu {

constexpr int64_t kKeyBlock = 64;
constexpr int64_t kTileRowsOfQueries = 128;  // rows that share the keys and values loaded

// c[r][0:Vectors*8] continues its chain with a[r * a_row + k * a_depth] * b[k * b_depth + 0:...],
// k ascending over [0, depth). From k = whole on, a lane takes part only while k < counts[lane].
template <int Rows, int Vectors>
inline void LaneKernel(int64_t depth, const float* a, int64_t a_row, int64_t a_depth,
                       const float* b, int64_t b_depth, float* c, int64_t c_row, int64_t whole,
                       const int32_t* counts) {
  typedef int32_t Int8 __attribute__((vector_size(32)));
  Vec8 sum[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) sum[r][v] = Load8(c + r * c_row + 8 * v);
  }
  for (int64_t k = 0; k < whole; ++k) {
    Vec8 right[Vectors];
    for (int v = 0; v < Vectors; ++v) right[v] = Load8(b + k * b_depth + 8 * v);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const float x = a[r * a_row + k * a_depth];
      const Vec8 value = {x, x, x, x, x, x, x, x};
      for (int v = 0; v < Vectors; ++v) sum[r][v] = Fma(value, right[v], sum[r][v]);
    }
  }
  for (int64_t k = whole; k < depth; ++k) {
    const int32_t index = static_cast<int32_t>(k);
    const Int8 indices = {index, index, index, index, index, index, index, index};
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const float x = a[r * a_row + k * a_depth];
      const Vec8 value = {x, x, x, x, x, x, x, x};
      for (int v = 0; v < Vectors; ++v) {
        Int8 count;
        memcpy(&count, counts + 8 * v, sizeof(count));
        const Vec8 next = Fma(value, Load8(b + k * b_depth + 8 * v), sum[r][v]);
        sum[r][v] = indices < count ? next : sum[r][v];
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) Store8(c + r * c_row + 8 * v, sum[r][v]);
  }
}

// LaneKernel over any number of rows.
template <int Vectors>
inline void LaneProduct(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_depth,
                        const float* b, int64_t b_depth, float* c, int64_t c_row, int64_t whole,
                        const int32_t* counts) {
#define JAXFP4_LANE_KERNEL(Rows)                                                             \
  LaneKernel<Rows, Vectors>(depth, a + r * a_row, a_row, a_depth, b, b_depth, c + r * c_row, \
                            c_row, whole, counts)
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) JAXFP4_LANE_KERNEL(6);
  switch (rows - r) {
    case 1:
      return JAXFP4_LANE_KERNEL(1);
    case 2:
      return JAXFP4_LANE_KERNEL(2);
    case 3:
      return JAXFP4_LANE_KERNEL(3);
    case 4:
      return JAXFP4_LANE_KERNEL(4);
    case 5:
      return JAXFP4_LANE_KERNEL(5);
    default:
      return;
  }
#undef JAXFP4_LANE_KERNEL
}

// A run of rows: queries [first_query, last_query) of one batch element and KV head, all with the
// same first key, times that KV head's query heads, query by query.
struct RowRun {
  const AttentionShape& shape;
  int64_t batch, kv_head, first_query, last_query;
  int64_t start, largest_end;

  int64_t rows() const { return (last_query - first_query) * shape.heads_per_kv(); }
  int64_t query(int64_t row) const { return first_query + row / shape.heads_per_kv(); }
  // The row's place in [batch, queries, heads].
  int64_t Index(int64_t row) const {
    return (batch * shape.queries + query(row)) * shape.heads + kv_head * shape.heads_per_kv() +
           row % shape.heads_per_kv();
  }
};

// The slots that a query attends to, cut to the buffer. end is at least start.
struct KeyRange {
  int64_t start, end;
};

template <class T>
KeyRange RangeOf(const AttentionInput<T>& in, int64_t batch, int64_t query) {
  const int64_t index = batch * in.shape.queries + query;
  const int64_t start = std::clamp<int64_t>(in.key_start[index], 0, in.shape.slots);
  const int64_t end = std::clamp<int64_t>(in.key_end[index], start, in.shape.slots);
  return {start, end};
}

// Calls visit(run) for the runs of equal first key among queries [first, last).
template <class T, class Visit>
void ForEachRun(const AttentionInput<T>& in, int64_t batch, int64_t kv_head, int64_t first,
                int64_t last, const Visit& visit) {
  for (int64_t begin = first; begin < last;) {
    const int64_t start = RangeOf(in, batch, begin).start;
    int64_t largest_end = start, end = begin;
    for (; end < last; ++end) {
      const KeyRange range = RangeOf(in, batch, end);
      if (range.start != start) break;
      largest_end = std::max(largest_end, range.end);
    }
    visit(RowRun{in.shape, batch, kv_head, begin, end, start, largest_end});
    begin = end;
  }
}

// How many keys of the block at `begin` each lane attends to. An unused lane does as lane 0.
template <int Lanes>
struct LaneCounts {
  alignas(64) int32_t counts[Lanes];
  int64_t least = kKeyBlock, most = 0;

  LaneCounts(const int64_t* ends, int64_t used_lanes, int64_t begin) {
    for (int64_t lane = 0; lane < Lanes; ++lane) {
      const int64_t end = ends[lane < used_lanes ? lane : 0];
      const int64_t count = std::clamp<int64_t>(end - begin, 0, kKeyBlock);
      counts[lane] = static_cast<int32_t>(count);
      least = std::min(least, count);
      most = std::max(most, count);
    }
  }
};

// `count` rows of one KV head from slot `begin` on, as fp32 [count][head_dim].
template <class T>
void LoadSlots(const AttentionShape& shape, const T* values, int64_t batch, int64_t kv_head,
               int64_t begin, int64_t count, float* out) {
  const int64_t dim = shape.head_dim;
  for (int64_t i = 0; i < count; ++i) {
    const T* source = values + ((batch * shape.slots + begin + i) * shape.kv_heads + kv_head) * dim;
    for (int64_t d = 0; d < dim; ++d) out[i * dim + d] = ToFloat(source[d]);
  }
}

// Queries in one tile, so that it has about kTileRowsOfQueries rows.
inline int64_t QueriesPerTile(const AttentionShape& shape) {
  return std::max<int64_t>(1, kTileRowsOfQueries / shape.heads_per_kv());
}

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_ATTENTION_LANES_H_
