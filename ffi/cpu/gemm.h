// Matrix products whose every element is one chain of fp32 fused multiply-adds, k ascending.
//
//   c[i, j] = fma(a[i, K-1], b[j, K-1], ... fma(a[i, 1], b[j, 1], fma(a[i, 0], b[j, 0], 0)))
//
// That order is the whole contract of this file: an element's bits depend on its row of a and its
// column of b alone, not on the tile, the thread, the number of rows or the blocking of K (which
// parks the chain in memory and takes it up again). Products of two bf16 values are exact in
// fp32, so for them the chain is the plain fp32 sum in index order.
//
// Operands come in through packers, small callables that decode a strip to fp32 in the order in
// which the micro-kernel reads it:
//   pack(first, count, k_begin, k_end, out): out[(k - k_begin) * width + j] = value(first + j, k)
// for j < count, and 0 for count <= j < width. Packers for row-major, transposed and NVFP4
// operands follow below.
#ifndef JAXFP4_CPU_GEMM_H_
#define JAXFP4_CPU_GEMM_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "ffi/cpu/float_values.h"
#include "ffi/numerics.h"

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace jaxfp4::cpu {

constexpr int kTileRows = 6;      // micro-kernel rows: a packed strip of a holds 6 rows
constexpr int kTileColumns = 16;  // micro-kernel columns: two vectors of eight floats
constexpr int64_t kDepthBlock = 256;

typedef float Vec8 __attribute__((vector_size(32)));

inline Vec8 Fma(Vec8 a, Vec8 b, Vec8 c) {
#if defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int i = 0; i < 8; ++i) c[i] = std::fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

inline Vec8 Load8(const float* p) {
  Vec8 v;
  memcpy(&v, p, sizeof(v));
  return v;
}

inline void Store8(float* p, Vec8 v) { memcpy(p, &v, sizeof(v)); }

// c[r, 0:16] continues its chain with a[k, r] * b[k, 0:16] for k in [0, depth), r < Rows.
template <int Rows>
inline void MicroKernel(int64_t depth, const float* a, const float* b, float* c, int64_t c_stride) {
  Vec8 left[Rows], right[Rows];
  for (int r = 0; r < Rows; ++r) {
    left[r] = Load8(c + r * c_stride);
    right[r] = Load8(c + r * c_stride + 8);
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vec8 b_left = Load8(b + k * kTileColumns);
    const Vec8 b_right = Load8(b + k * kTileColumns + 8);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const float x = a[k * kTileRows + r];
      const Vec8 value = {x, x, x, x, x, x, x, x};
      left[r] = Fma(value, b_left, left[r]);
      right[r] = Fma(value, b_right, right[r]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    Store8(c + r * c_stride, left[r]);
    Store8(c + r * c_stride + 8, right[r]);
  }
}

// Out of line: it is called from many instantiations of ComputeTile, and inlining it into each
// would multiply the time that they take to compile.
__attribute__((noinline)) inline void MicroKernel(int64_t rows, int64_t depth, const float* a,
                                                  const float* b, float* c, int64_t c_stride) {
  switch (rows) {
    case 1:
      return MicroKernel<1>(depth, a, b, c, c_stride);
    case 2:
      return MicroKernel<2>(depth, a, b, c, c_stride);
    case 3:
      return MicroKernel<3>(depth, a, b, c, c_stride);
    case 4:
      return MicroKernel<4>(depth, a, b, c, c_stride);
    case 5:
      return MicroKernel<5>(depth, a, b, c, c_stride);
    default:
      return MicroKernel<6>(depth, a, b, c, c_stride);
  }
}

// Memory for one thread's tile, kept between calls.
class Scratch {
 public:
  float* Get(int64_t floats) {
    if (floats > size_) {
      data_.reset(static_cast<float*>(::operator new(floats * sizeof(float), kAlignment)));
      size_ = floats;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlignment); }
  };
  static constexpr std::align_val_t kAlignment{64};
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
};

// One tile of c: rows [row, row + rows) of a against columns [column, column + columns) of b over
// [depth_begin, depth_end). store(i, j, count, values) receives each row of the tile in strips.
struct Tile {
  int64_t row, rows, column, columns, depth_begin, depth_end;
};

template <class PackA, class PackB, class Store>
void ComputeTile(const Tile& tile, const PackA& pack_a, const PackB& pack_b, const Store& store) {
  const int64_t row_strips = (tile.rows + kTileRows - 1) / kTileRows;
  const int64_t column_strips = (tile.columns + kTileColumns - 1) / kTileColumns;
  const int64_t c_stride = column_strips * kTileColumns;
  const int64_t c_size = row_strips * kTileRows * c_stride;
  const int64_t a_size = row_strips * kTileRows * kDepthBlock;
  thread_local Scratch scratch;
  float* c = scratch.Get(c_size + a_size + kTileColumns * kDepthBlock);
  float* a = c + c_size;
  float* b = a + a_size;
  std::fill_n(c, c_size, 0.0f);
  for (int64_t k = tile.depth_begin; k < tile.depth_end; k += kDepthBlock) {
    const int64_t k_end = std::min(k + kDepthBlock, tile.depth_end);
    for (int64_t i = 0; i < tile.rows; i += kTileRows) {
      pack_a(tile.row + i, std::min<int64_t>(kTileRows, tile.rows - i), k, k_end,
             a + i * kDepthBlock);
    }
    for (int64_t j = 0; j < tile.columns; j += kTileColumns) {
      pack_b(tile.column + j, std::min<int64_t>(kTileColumns, tile.columns - j), k, k_end, b);
      for (int64_t i = 0; i < tile.rows; i += kTileRows) {
        MicroKernel(std::min<int64_t>(kTileRows, tile.rows - i), k_end - k, a + i * kDepthBlock, b,
                    c + i * c_stride + j, c_stride);
      }
    }
  }
  for (int64_t i = 0; i < tile.rows; ++i) {
    store(tile.row + i, tile.column, tile.columns, c + i * c_stride);
  }
}

// --- Reading values as fp32 ---

// A row-major matrix of float or bf16 (as uint16_t); row i starts at data + i * stride.
template <class T>
struct RowMajor {
  const T* data;
  int64_t stride;

  void Read(int64_t row, int64_t k_begin, int64_t k_end, float* out) const {
    const T* source = data + row * stride;
    for (int64_t k = k_begin; k < k_end; ++k) out[k - k_begin] = ToFloat(source[k]);
  }
};

// An NVFP4 matrix without its fp32 scale: code times block scale, which is exact.
struct Nvfp4RowMajor {
  const uint8_t* codes;         // [rows, depth / 2]
  const uint8_t* block_scales;  // [rows, depth / 16]
  int64_t depth;

  // k_begin and k_end must be multiples of 16 (kDepthBlock is).
  void Read(int64_t row, int64_t k_begin, int64_t k_end, float* out) const {
    const uint8_t* code = codes + row * (depth / 2) + k_begin / 2;
    const uint8_t* block_scale = block_scales + row * (depth / kBlock);
    for (int64_t k = k_begin; k < k_end; k += kBlock, code += kBlock / 2, out += kBlock) {
      const float sf = E4m3ToFloat(block_scale[k / kBlock]);
      for (int i = 0; i < kBlock / 2; ++i) memcpy(out + 2 * i, &kPairs[code[i]], 8);
      for (int i = 0; i < kBlock; ++i) out[i] *= sf;
    }
  }

  using Pair = std::array<float, 2>;
  static const std::array<Pair, 256> kPairs;  // the two values of every byte
};

inline const std::array<Nvfp4RowMajor::Pair, 256> Nvfp4RowMajor::kPairs = [] {
  std::array<Pair, 256> pairs;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    pairs[byte] = {E2m1ToFloat(byte & 15u), E2m1ToFloat(byte >> 4)};
  }
  return pairs;
}();

// --- Packers ---

// The contraction runs along the matrix's rows: value(i, k) = matrix[i, k].
template <int Width, class Matrix>
struct PackRows {
  Matrix matrix;

  void operator()(int64_t first, int64_t count, int64_t k_begin, int64_t k_end, float* out) const {
    float row[kDepthBlock];
    const int64_t depth = k_end - k_begin;
    if (count < Width) std::fill_n(out, depth * Width, 0.0f);
    for (int64_t j = 0; j < count; ++j) {
      matrix.Read(first + j, k_begin, k_end, row);
      for (int64_t k = 0; k < depth; ++k) out[k * Width + j] = row[k];
    }
  }
};

// The contraction runs across the matrix's rows: value(i, k) = matrix[k, i].
template <int Width, class T>
struct PackColumns {
  RowMajor<T> matrix;

  void operator()(int64_t first, int64_t count, int64_t k_begin, int64_t k_end, float* out) const {
    for (int64_t k = k_begin; k < k_end; ++k, out += Width) {
      const T* source = matrix.data + k * matrix.stride + first;
      for (int64_t j = 0; j < count; ++j) out[j] = ToFloat(source[j]);
      for (int64_t j = count; j < Width; ++j) out[j] = 0.0f;
    }
  }
};

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_GEMM_H_
