// What the product custom calls take and return, and which of it is legal.
//
// In every one of them M counts tokens, N outputs and K inputs of a linear layer: y [M, N],
// x or a [M, K], w or b [N, K], with a leading axis of G groups in a grouped call.
#ifndef JAXFP4_PRODUCT_OPERANDS_H_
#define JAXFP4_PRODUCT_OPERANDS_H_

#include <cstdint>
#include <optional>

#include "ffi/numerics.h"
#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfp4 {

constexpr int64_t kWorkspacePerGroup = 256;  // bytes

struct ProductDims {
  int64_t groups;  // G; 1 in a dense call
  int64_t m, n, k;
  int64_t a_scales = 0;            // 0 (absent), 1 or M
  int64_t b_scales_per_group = 0;  // 0 (absent), 1 or N
};

// What a grouped call has beside the operands of its dense one.
struct Grouping {
  AnyBuffer group_sizes;  // s32 [G]
  AnyResult workspace;    // u8, at least 256 G bytes
};

namespace internal {

inline void CheckGrouping(OperandCheck& check, std::optional<Grouping>& grouping, Dim* g) {
  if (!grouping) return;
  check.Is("group_sizes", grouping->group_sizes, {::xla::ffi::S32}, {g});
  if (check.ok() && g->size == 0) {
    check.Refuse("group_sizes", grouping->group_sizes, "s32 [G] with at least one group");
  }
  check.HasRoom("workspace", *grouping->workspace, kWorkspacePerGroup * g->size);
}

// A matrix of [rows, columns], or one for each group.
inline void CheckMatrix(OperandCheck& check, const char* name, const AnyBuffer& buffer,
                        OperandCheck::Types types, bool grouped, Dim* g, Dim* rows, Dim* columns) {
  if (grouped) {
    check.Is(name, buffer, types, {g, rows, columns});
  } else {
    check.Is(name, buffer, types, {rows, columns});
  }
}

inline void CheckScales(OperandCheck& check, const AnyBuffer& a_scale, const AnyBuffer& b_scale,
                        bool may_be_absent, bool grouped, ProductDims* dims) {
  Dim one{nullptr, 1}, m{"M", dims->m};
  Dim by_group{grouped ? "G" : nullptr, dims->groups};
  Dim by_column{grouped ? "G*N" : "N", dims->groups * dims->n};
  const OperandCheck::Types f32 = {::xla::ffi::F32};
  if (may_be_absent) {
    check.IsAbsentOr("a_scale", a_scale, f32, {{&m}, {&one}});
    check.IsAbsentOr("b_scale", b_scale, f32, {{&by_column}, {&by_group}});
  } else {
    check.IsOneOf("a_scale", a_scale, f32, {{&m}, {&one}});
    check.IsOneOf("b_scale", b_scale, f32, {{&by_column}, {&by_group}});
  }
  if (!check.ok()) return;
  dims->a_scales = static_cast<int64_t>(a_scale.element_count());
  dims->b_scales_per_group = static_cast<int64_t>(b_scale.element_count()) / dims->groups;
}

}  // namespace internal

// --- matmul and grouped_matmul ---

// a bf16|f32 [M, K], b like a [N, K] or [G, N, K], y bf16|f32 [M, N]; a_scale f32 [M], [1] or
// absent, b_scale f32 [N], [1] or absent, grouped [G * N], [G] or absent.
inline ::xla::ffi::ErrorOr<ProductDims> CheckMatmul(AnyBuffer a, AnyBuffer b, AnyBuffer a_scale,
                                                    AnyBuffer b_scale, AnyResult y,
                                                    std::optional<Grouping> grouping) {
  OperandCheck check(grouping ? "grouped_matmul" : "matmul");
  Dim g{"G", grouping ? -1 : 1}, m{"M"}, n{"N"}, k{"K"};
  internal::CheckGrouping(check, grouping, &g);
  check.Is("a", a, OperandCheck::kFloats, {&m, &k});
  internal::CheckMatrix(check, "b", b, {a.element_type()}, grouping.has_value(), &g, &n, &k);
  check.Is("y", *y, OperandCheck::kFloats, {&m, &n});
  ProductDims dims{g.size, m.size, n.size, k.size};
  internal::CheckScales(check, a_scale, b_scale, true, grouping.has_value(), &dims);
  return check.Finish(dims);
}

template <class Context>
auto BindMatmul() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()   // a
      .template Arg<AnyBuffer>()   // b
      .template Arg<AnyBuffer>()   // a_scale
      .template Arg<AnyBuffer>()   // b_scale
      .template Ret<AnyBuffer>();  // y
}

template <class Context>
auto BindGroupedMatmul() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()   // a
      .template Arg<AnyBuffer>()   // b
      .template Arg<AnyBuffer>()   // a_scale
      .template Arg<AnyBuffer>()   // b_scale
      .template Arg<AnyBuffer>()   // group_sizes
      .template Ret<AnyBuffer>()   // y
      .template Ret<AnyBuffer>();  // workspace
}

// --- nvfp4_matmul and nvfp4_grouped_matmul ---

// codes u8 [.., K/2] and block_scales f8e4m3fn [.., K/16] in place of the matrices of matmul, and
// scales that are not absent.
inline ::xla::ffi::ErrorOr<ProductDims> CheckNvfp4Matmul(
    AnyBuffer a_codes, AnyBuffer a_block_scales, AnyBuffer a_scale, AnyBuffer b_codes,
    AnyBuffer b_block_scales, AnyBuffer b_scale, AnyResult y, std::optional<Grouping> grouping) {
  using ::xla::ffi::F8E4M3FN;
  using ::xla::ffi::U8;
  const bool grouped = grouping.has_value();
  OperandCheck check(grouped ? "nvfp4_grouped_matmul" : "nvfp4_matmul");
  Dim g{"G", grouped ? -1 : 1}, m{"M"}, n{"N"}, half{"K/2"};
  internal::CheckGrouping(check, grouping, &g);
  check.Is("a_codes", a_codes, {U8}, {&m, &half});
  if (check.ok() && half.size % (kBlock / 2) != 0) {
    check.Refuse("a_codes", a_codes, "u8 [M, K/2] with K a multiple of 16");
  }
  Dim blocks{"K/16", half.size / (kBlock / 2)};
  check.Is("a_block_scales", a_block_scales, {F8E4M3FN}, {&m, &blocks});
  internal::CheckMatrix(check, "b_codes", b_codes, {U8}, grouped, &g, &n, &half);
  internal::CheckMatrix(check, "b_block_scales", b_block_scales, {F8E4M3FN}, grouped, &g, &n,
                        &blocks);
  check.Is("y", *y, OperandCheck::kFloats, {&m, &n});
  ProductDims dims{g.size, m.size, n.size, 2 * half.size};
  internal::CheckScales(check, a_scale, b_scale, false, grouped, &dims);
  return check.Finish(dims);
}

template <class Context>
auto BindNvfp4Matmul() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()   // a_codes
      .template Arg<AnyBuffer>()   // a_block_scales
      .template Arg<AnyBuffer>()   // a_scale
      .template Arg<AnyBuffer>()   // b_codes
      .template Arg<AnyBuffer>()   // b_block_scales
      .template Arg<AnyBuffer>()   // b_scale
      .template Ret<AnyBuffer>();  // y
}

template <class Context>
auto BindNvfp4GroupedMatmul() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()   // a_codes
      .template Arg<AnyBuffer>()   // a_block_scales
      .template Arg<AnyBuffer>()   // a_scale
      .template Arg<AnyBuffer>()   // b_codes
      .template Arg<AnyBuffer>()   // b_block_scales
      .template Arg<AnyBuffer>()   // b_scale
      .template Arg<AnyBuffer>()   // group_sizes
      .template Ret<AnyBuffer>()   // y
      .template Ret<AnyBuffer>();  // workspace
}

// --- matmul_dx, matmul_dw and their grouped calls ---

// g bf16|f32 [M, N], w like g [N, K] or [G, N, K], dx bf16|f32 [M, K].
inline ::xla::ffi::ErrorOr<ProductDims> CheckMatmulDx(AnyBuffer g, AnyBuffer w, AnyResult dx,
                                                      std::optional<Grouping> grouping) {
  OperandCheck check(grouping ? "grouped_matmul_dx" : "matmul_dx");
  Dim groups{"G", grouping ? -1 : 1}, m{"M"}, n{"N"}, k{"K"};
  internal::CheckGrouping(check, grouping, &groups);
  check.Is("g", g, OperandCheck::kFloats, {&m, &n});
  internal::CheckMatrix(check, "w", w, {g.element_type()}, grouping.has_value(), &groups, &n, &k);
  check.Is("dx", *dx, OperandCheck::kFloats, {&m, &k});
  return check.Finish(ProductDims{groups.size, m.size, n.size, k.size});
}

// g bf16|f32 [M, N], x like g [M, K], dw bf16|f32 [N, K] or [G, N, K].
inline ::xla::ffi::ErrorOr<ProductDims> CheckMatmulDw(AnyBuffer g, AnyBuffer x, AnyResult dw,
                                                      std::optional<Grouping> grouping) {
  OperandCheck check(grouping ? "grouped_matmul_dw" : "matmul_dw");
  Dim groups{"G", grouping ? -1 : 1}, m{"M"}, n{"N"}, k{"K"};
  internal::CheckGrouping(check, grouping, &groups);
  check.Is("g", g, OperandCheck::kFloats, {&m, &n});
  check.Is("x", x, {g.element_type()}, {&m, &k});
  internal::CheckMatrix(check, "dw", *dw, OperandCheck::kFloats, grouping.has_value(), &groups, &n,
                        &k);
  return check.Finish(ProductDims{groups.size, m.size, n.size, k.size});
}

// Of matmul_dx and matmul_dw.
template <class Context>
auto BindMatmulGrad() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()   // g
      .template Arg<AnyBuffer>()   // w, or x
      .template Ret<AnyBuffer>();  // dx, or dw
}

template <class Context>
auto BindGroupedMatmulGrad() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()   // g
      .template Arg<AnyBuffer>()   // w, or x
      .template Arg<AnyBuffer>()   // group_sizes
      .template Ret<AnyBuffer>()   // dx, or dw
      .template Ret<AnyBuffer>();  // workspace
}

}  // namespace jaxfp4

#endif  // JAXFP4_PRODUCT_OPERANDS_H_
