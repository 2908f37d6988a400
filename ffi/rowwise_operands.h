// What rmsnorm, swiglu and qk_norm_rope take and return, and which of it is legal.
#ifndef JAXFP4_ROWWISE_OPERANDS_H_
#define JAXFP4_ROWWISE_OPERANDS_H_

#include <cstdint>

#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfp4 {

struct RowDims {
  int64_t rows, width;  // of y
};

// x bf16|f32 [M, W], weight f32 [W], y like x.
inline ::xla::ffi::ErrorOr<RowDims> CheckRmsNorm(AnyBuffer x, AnyBuffer weight, AnyResult y) {
  OperandCheck check("rmsnorm");
  Dim m{"M"}, w{"W"};
  check.Is("x", x, OperandCheck::kFloats, {&m, &w});
  check.Is("weight", weight, {::xla::ffi::F32}, {&w});
  check.Is("y", *y, {x.element_type()}, {&m, &w});
  return check.Finish(RowDims{m.size, w.size});
}

template <class Context>
auto BindRmsNorm() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()  // x
      .template Arg<AnyBuffer>()  // weight
      .template Attr<float>("eps")
      .template Ret<AnyBuffer>();  // y
}

// x bf16|f32 [M, 2W], gate first; y [M, W] of x's type.
inline ::xla::ffi::ErrorOr<RowDims> CheckSwiGlu(AnyBuffer x, AnyResult y) {
  OperandCheck check("swiglu");
  Dim m{"M"}, both{"2W"};
  check.Is("x", x, OperandCheck::kFloats, {&m, &both});
  if (check.ok() && both.size % 2 != 0) check.Refuse("x", x, "[M, 2W], an even number of columns");
  Dim w{"W", both.size / 2};
  check.Is("y", *y, {x.element_type()}, {&m, &w});
  return check.Finish(RowDims{m.size, w.size});
}

template <class Context>
auto BindSwiGlu() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()   // x
      .template Ret<AnyBuffer>();  // y
}

struct QkNormRopeDims {
  int64_t tokens, heads, head_dim;
};

// x bf16|f32 [T, heads, D], weight f32 [D] or absent (no norm), positions s32 [T], inv_freq f32
// [D/2], y like x.
inline ::xla::ffi::ErrorOr<QkNormRopeDims> CheckQkNormRope(AnyBuffer x, AnyBuffer weight,
                                                           AnyBuffer positions, AnyBuffer inv_freq,
                                                           AnyResult y) {
  OperandCheck check("qk_norm_rope");
  Dim t{"T"}, heads{"heads"}, d{"D"};
  check.Is("x", x, OperandCheck::kFloats, {&t, &heads, &d});
  if (check.ok() && d.size % 2 != 0) check.Refuse("x", x, "[T, heads, D] with D even");
  Dim half{"D/2", d.size / 2};
  check.IsAbsentOr("weight", weight, {::xla::ffi::F32}, {{&d}});
  check.Is("positions", positions, {::xla::ffi::S32}, {&t});
  check.Is("inv_freq", inv_freq, {::xla::ffi::F32}, {&half});
  check.Is("y", *y, {x.element_type()}, {&t, &heads, &d});
  return check.Finish(QkNormRopeDims{t.size, heads.size, d.size});
}

template <class Context>
auto BindQkNormRope() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()  // x
      .template Arg<AnyBuffer>()  // weight
      .template Arg<AnyBuffer>()  // positions
      .template Arg<AnyBuffer>()  // inv_freq
      .template Attr<float>("eps")
      .template Ret<AnyBuffer>();  // y
}

}  // namespace jaxfp4

#endif  // JAXFP4_ROWWISE_OPERANDS_H_
