// Dense and grouped matrix products on the CPU, over the fixed-order tiles of gemm.h.
//
// Row strips of the output are cut into tiles that threads take in any order; a group is cut on its
// own, so that a row's tile never spans two groups. A dense product is one group of all rows.
#ifndef JAXFP4_CPU_PRODUCTS_H_
#define JAXFP4_CPU_PRODUCTS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ffi/cpu/float_values.h"
#include "ffi/cpu/gemm.h"
#include "ffi/cpu/groups.h"
#include "ffi/cpu/parallel.h"

namespace jaxfp4::cpu {

template <class T>
void StoreFloats(const float* values, int64_t count, T* out) {
  for (int64_t j = 0; j < count; ++j) StoreFloat(values[j], &out[j]);
}

struct GroupTile {
  int64_t group;
  Tile tile;
};

// Tiles of rows x columns for each group. A tile's rows share the decoding of its columns, so
// tiles are tall; they are only as wide as leaves every thread some.
inline std::vector<GroupTile> CutTiles(const Groups& groups, int64_t columns, int64_t depth,
                                       int64_t threads) {
  constexpr int64_t kMaxRows = 192, kMinColumns = 32, kMaxColumns = 512;
  int64_t row_tiles = 0;
  for (int64_t g = 0; g < groups.count(); ++g) {
    row_tiles += (groups.rows(g) + kMaxRows - 1) / kMaxRows;
  }
  const int64_t wanted = columns * std::max<int64_t>(row_tiles, 1) / (4 * threads);
  const int64_t width = std::clamp(wanted / kTileColumns * kTileColumns, kMinColumns, kMaxColumns);
  std::vector<GroupTile> tiles;
  for (int64_t g = 0; g < groups.count(); ++g) {
    for (int64_t i = 0; i < groups.rows(g); i += kMaxRows) {
      for (int64_t j = 0; j < columns; j += width) {
        tiles.push_back({g,
                         {groups.starts[g] + i, std::min(kMaxRows, groups.rows(g) - i), j,
                          std::min(width, columns - j), 0, depth}});
      }
    }
  }
  return tiles;
}

// Rows of work below which a product runs on the calling thread: waking a helper costs more.
constexpr int64_t kSerialMultiplies = 1 << 17;

template <class Task>
void ForEachTile(Pool& pool, const std::vector<GroupTile>& tiles, int64_t multiplies,
                 const Task& task) {
  const int64_t count = static_cast<int64_t>(tiles.size());
  if (multiplies < kSerialMultiplies) {
    FlushDenormals flush;
    for (int64_t t = 0; t < count; ++t) task(tiles[t]);
    return;
  }
  ParallelFor(pool, count, [&](int64_t t) { task(tiles[t]); });
}

// How the fp32 scales of the two operands are spread: one value for all, or one per row (of b: per
// output column; in a grouped product per group, or per group and column). Null: no scale.
struct Scales {
  const float* data;
  int64_t count;
};

// y[i, j] = sum_k a[i, k] b[g, j, k], then times scale_b, then times scale_a; rows that belong to
// no group come out zero. ReadB(group) gives the group's matrix.
template <class MatrixA, class MatrixB, class Y>
void Forward(Pool& pool, const Groups& groups, int64_t rows, int64_t columns, int64_t depth,
             const MatrixA& a, const MatrixB& matrix_b, Scales scale_a, Scales scale_b, Y* y) {
  const auto tiles = CutTiles(groups, columns, depth, std::max<int64_t>(pool.num_threads(), 1));
  const int64_t scales_per_group = scale_b.count / groups.count();
  ForEachTile(pool, tiles, groups.used_rows() * columns * depth, [&](const GroupTile& work) {
    const auto b = matrix_b(work.group);
    const float* group_scale = scale_b.data + work.group * scales_per_group;
    const PackRows<kTileRows, MatrixA> pack_a{a};
    const PackRows<kTileColumns, decltype(b)> pack_b{b};
    ComputeTile(work.tile, pack_a, pack_b, [&](int64_t i, int64_t j, int64_t count, float* values) {
      if (scale_b.data != nullptr) {
        const int64_t stride = scales_per_group == 1 ? 0 : 1;
        for (int64_t c = 0; c < count; ++c) values[c] *= group_scale[(j + c) * stride];
      }
      if (scale_a.data != nullptr) {
        const float row_scale = scale_a.data[scale_a.count == 1 ? 0 : i];
        for (int64_t c = 0; c < count; ++c) values[c] *= row_scale;
      }
      StoreFloats(values, count, y + i * columns + j);
    });
  });
  std::fill(y + groups.used_rows() * columns, y + rows * columns, Y(0));
}

// dx[i, k] = sum_n g[i, n] w[group, n, k].
template <class T, class Y>
void BackwardInput(Pool& pool, const Groups& groups, int64_t rows, int64_t depth, int64_t columns,
                   const T* g, const T* w, Y* dx) {
  const auto tiles = CutTiles(groups, columns, depth, std::max<int64_t>(pool.num_threads(), 1));
  ForEachTile(pool, tiles, groups.used_rows() * columns * depth, [&](const GroupTile& work) {
    const PackRows<kTileRows, RowMajor<T>> pack_g{{g, depth}};
    const PackColumns<kTileColumns, T> pack_w{{w + work.group * depth * columns, columns}};
    ComputeTile(work.tile, pack_g, pack_w, [&](int64_t i, int64_t j, int64_t count, float* values) {
      StoreFloats(values, count, dx + i * columns + j);
    });
  });
  std::fill(dx + groups.used_rows() * columns, dx + rows * columns, Y(0));
}

// dw[group, n, k] = sum over the group's rows m of g[m, n] x[m, k]; an empty group gives zeros.
template <class T, class Y>
void BackwardWeight(Pool& pool, const Groups& groups, int64_t outputs, int64_t inputs, const T* g,
                    const T* x, Y* dw) {
  // The tiles cut [groups, outputs, inputs]; each group's depth is its own row range.
  Groups output_rows;
  for (int64_t i = 0; i < groups.count(); ++i) {
    output_rows.starts.push_back(output_rows.used_rows() + outputs);
  }
  auto tiles = CutTiles(output_rows, inputs, 0, std::max<int64_t>(pool.num_threads(), 1));
  ForEachTile(pool, tiles, groups.used_rows() * outputs * inputs, [&](const GroupTile& work) {
    Y* group_dw = dw + work.group * outputs * inputs;
    Tile tile = work.tile;
    tile.row -= work.group * outputs;
    tile.depth_begin = groups.starts[work.group];
    tile.depth_end = groups.starts[work.group + 1];
    const PackColumns<kTileRows, T> pack_g{{g, outputs}};
    const PackColumns<kTileColumns, T> pack_x{{x, inputs}};
    ComputeTile(tile, pack_g, pack_x, [&](int64_t i, int64_t j, int64_t count, float* values) {
      StoreFloats(values, count, group_dw + i * inputs + j);
    });
  });
}

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_PRODUCTS_H_
