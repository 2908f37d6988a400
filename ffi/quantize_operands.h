// What the three quantize custom calls take and return, and which of it is legal.
//
// They share their operands and attributes and differ in what they write: packed codes with linear
// block scales, packed codes with tiled block scales (each group from its own 128-row tile), or the
// values that code times block scale gives, exact in bf16.
#ifndef JAXFP4_QUANTIZE_OPERANDS_H_
#define JAXFP4_QUANTIZE_OPERANDS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "ffi/front.h"
#include "ffi/numerics.h"
#include "ffi/operands.h"
#include "ffi/scale_layout.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfp4 {

struct QuantizeOperands {
  AnyBuffer x;             // bf16|f32 [M', K], or [M', 2K] under SwiGLU
  AnyBuffer front_weight;  // f32 [K] under RMSNorm, else absent
  AnyBuffer rows;          // s32 [M] gathers x's rows, or absent: M = M'
  AnyBuffer amax;          // f32 [S], or absent
  AnyBuffer group_sizes;   // s32 [G]: later rows than their sum are not read; or absent
  Front front;
  float eps;
  int64_t rows_per_scale;
  bool pow2_scale;
  bool four_over_six;
};

struct QuantizeDims {
  int64_t x_rows;  // M'
  int64_t rows;    // M
  int64_t depth;   // K, a positive multiple of 16
  int64_t scales;  // S = M / rows_per_scale
  int64_t groups;  // G, 0 where group_sizes is absent
};

namespace internal {

// All but the results that hold the quantised values.
inline QuantizeDims CheckQuantizeOperands(OperandCheck& check, const QuantizeOperands& in,
                                          AnyResult scale) {
  using DataType = ::xla::ffi::DataType;
  Dim x_rows{"M'"}, width{"width"}, m{"M"}, g{"G"};
  check.Is("x", in.x, OperandCheck::kFloats, {&x_rows, &width});
  const int64_t front = static_cast<int64_t>(in.front);
  if (front < 0 || front > 2) {
    check.Refuse("front is " + std::to_string(front) +
                 "; it must be 0 (none), 1 (SwiGLU) or 2 (RMSNorm)");
  }
  const int64_t rows_of_k = in.front == Front::kSwiGlu ? 2 : 1;
  Dim k{"K", width.size / rows_of_k};
  if (check.ok() && (k.size == 0 || width.size % (rows_of_k * kBlock) != 0)) {
    check.Refuse("x", in.x,
                 rows_of_k == 2 ? "[M', 2K] under SwiGLU with K a positive multiple of 16"
                                : "[M', K] with K a positive multiple of 16");
  }
  if (in.front == Front::kRmsNorm) {
    check.Is("front_weight", in.front_weight, {DataType::F32}, {&k});
  } else {
    check.MustBeAbsent("front_weight", in.front_weight, DataType::F32);
  }
  check.IsAbsentOr("rows", in.rows, {DataType::S32}, {{&m}});
  if (IsAbsent(in.rows)) m.size = x_rows.size;
  const int64_t per_scale = in.rows_per_scale;
  if (check.ok() && (per_scale < (m.size == 0 ? 0 : 1) || (m.size != 0 && m.size % per_scale))) {
    check.Refuse("rows_per_scale is " + std::to_string(per_scale) + "; it must divide the " +
                 std::to_string(m.size) + " rows");
  }
  Dim s{"S", check.ok() && m.size != 0 ? m.size / per_scale : 0};
  check.IsAbsentOr("amax", in.amax, {DataType::F32}, {{&s}});
  check.IsAbsentOr("group_sizes", in.group_sizes, {DataType::S32}, {{&g}});
  check.Is("scale", *scale, {DataType::F32}, {&s});
  return {x_rows.size, m.size, k.size, s.size, IsAbsent(in.group_sizes) ? 0 : g.size};
}

inline void CheckCodes(OperandCheck& check, const QuantizeDims& dims, AnyResult codes) {
  Dim m{"M", dims.rows}, half{"K/2", dims.depth / 2};
  check.Is("codes", *codes, {::xla::ffi::U8}, {&m, &half});
}

}  // namespace internal

// codes u8 [M, K/2], block_scales f8e4m3fn [M, K/16], scale f32 [S].
inline ::xla::ffi::ErrorOr<QuantizeDims> CheckQuantize(const QuantizeOperands& in, AnyResult codes,
                                                       AnyResult block_scales, AnyResult scale) {
  OperandCheck check("quantize");
  const QuantizeDims dims = internal::CheckQuantizeOperands(check, in, scale);
  internal::CheckCodes(check, dims, codes);
  Dim m{"M", dims.rows}, blocks{"K/16", dims.depth / kBlock};
  check.Is("block_scales", *block_scales, {::xla::ffi::F8E4M3FN}, {&m, &blocks});
  return check.Finish(dims);
}

// codes u8 [M, K/2], block_scales u8 with room for the tiles of M + 128 G rows, scale f32 [S].
inline ::xla::ffi::ErrorOr<QuantizeDims> CheckQuantizeTiled(const QuantizeOperands& in,
                                                            AnyResult codes, AnyResult block_scales,
                                                            AnyResult scale) {
  OperandCheck check("quantize_tiled");
  const QuantizeDims dims = internal::CheckQuantizeOperands(check, in, scale);
  internal::CheckCodes(check, dims, codes);
  check.HasRoom("block_scales", *block_scales,
                TiledScaleBytes(dims.rows + kScaleTileRows * dims.groups, dims.depth / kBlock));
  return check.Finish(dims);
}

// values bf16 [M, K], scale f32 [S].
inline ::xla::ffi::ErrorOr<QuantizeDims> CheckQuantizeExpanded(const QuantizeOperands& in,
                                                               AnyResult values, AnyResult scale) {
  OperandCheck check("quantize_expanded");
  const QuantizeDims dims = internal::CheckQuantizeOperands(check, in, scale);
  Dim m{"M", dims.rows}, k{"K", dims.depth};
  check.Is("values", *values, {::xla::ffi::BF16}, {&m, &k});
  return check.Finish(dims);
}

// Context is ffi::ThreadPool, or ffi::PlatformStream<cudaStream_t>. Two results: values, scale;
// three: codes, block_scales, scale.
template <class Context>
auto BindQuantizeExpanded() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()  // x
      .template Arg<AnyBuffer>()  // front_weight
      .template Arg<AnyBuffer>()  // rows
      .template Arg<AnyBuffer>()  // amax
      .template Arg<AnyBuffer>()  // group_sizes
      .template Attr<int64_t>("front")
      .template Attr<float>("eps")
      .template Attr<int64_t>("rows_per_scale")
      .template Attr<bool>("pow2_scale")
      .template Attr<bool>("four_over_six")
      .template Ret<AnyBuffer>()
      .template Ret<AnyBuffer>();
}

template <class Context>
auto BindQuantize() {
  return BindQuantizeExpanded<Context>().template Ret<AnyBuffer>();
}

// A handler for these bindings that returns run(context, QuantizeOperands, results...).
template <class Run>
auto QuantizeHandler(const Run& run) {
  return [run](auto context, AnyBuffer x, AnyBuffer front_weight, AnyBuffer rows, AnyBuffer amax,
               AnyBuffer group_sizes, int64_t front, float eps, int64_t rows_per_scale,
               bool pow2_scale, bool four_over_six, auto... results) {
    return run(std::move(context),
               QuantizeOperands{x, front_weight, rows, amax, group_sizes, static_cast<Front>(front),
                                eps, rows_per_scale, pow2_scale, four_over_six},
               results...);
  };
}

}  // namespace jaxfp4

#endif  // JAXFP4_QUANTIZE_OPERANDS_H_
