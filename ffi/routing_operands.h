// What router_topk, combine_experts and combine_experts_grad take and return, and which of it is
// legal.
#ifndef JAXFP4_ROUTING_OPERANDS_H_
#define JAXFP4_ROUTING_OPERANDS_H_

#include <cstdint>
#include <string>

#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfp4 {

struct RouterDims {
  int64_t rows, num_experts, k;
};

// logits f32 [M, E], given_experts s32 [M, k] or absent (the choice is made here); weights f32
// [M, k], experts s32 [M, k], k at most E.
inline ::xla::ffi::ErrorOr<RouterDims> CheckRouterTopK(AnyBuffer logits, AnyBuffer given_experts,
                                                       AnyResult weights, AnyResult experts) {
  OperandCheck check("router_topk");
  Dim m{"M"}, e{"E"}, k{"k"};
  check.Is("logits", logits, {::xla::ffi::F32}, {&m, &e});
  check.Is("weights", *weights, {::xla::ffi::F32}, {&m, &k});
  if (check.ok() && k.size > e.size) {
    check.Refuse("weights", *weights,
                 "[M, k] with k at most the " + std::to_string(e.size) + " experts");
  }
  check.Is("experts", *experts, {::xla::ffi::S32}, {&m, &k});
  check.IsAbsentOr("given_experts", given_experts, {::xla::ffi::S32}, {{&m, &k}});
  return check.Finish(RouterDims{m.size, e.size, k.size});
}

template <class Context>
auto BindRouterTopK() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()  // logits
      .template Arg<AnyBuffer>()  // given_experts
      .template Attr<bool>("norm_topk_prob")
      .template Ret<AnyBuffer>()   // weights
      .template Ret<AnyBuffer>();  // experts
}

struct CombineDims {
  int64_t y_rows, width, rows, k;
};

// y bf16|f32 [R, W], weights f32 [M, k], slots s32 [M, k]; out [M, W] of y's type.
inline ::xla::ffi::ErrorOr<CombineDims> CheckCombineExperts(AnyBuffer y, AnyBuffer weights,
                                                            AnyBuffer slots, AnyResult out) {
  OperandCheck check("combine_experts");
  Dim r{"R"}, w{"W"}, m{"M"}, k{"k"};
  check.Is("y", y, OperandCheck::kFloats, {&r, &w});
  check.Is("weights", weights, {::xla::ffi::F32}, {&m, &k});
  check.Is("slots", slots, {::xla::ffi::S32}, {&m, &k});
  check.Is("out", *out, {y.element_type()}, {&m, &w});
  return check.Finish(CombineDims{r.size, w.size, m.size, k.size});
}

template <class Context>
auto BindCombineExperts() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()   // y
      .template Arg<AnyBuffer>()   // weights
      .template Arg<AnyBuffer>()   // slots
      .template Ret<AnyBuffer>();  // out
}

// The operands of combine_experts and d_out [M, W] of y's type; dy like y, dweights f32 [M, k].
inline ::xla::ffi::ErrorOr<CombineDims> CheckCombineExpertsGrad(AnyBuffer y, AnyBuffer weights,
                                                                AnyBuffer slots, AnyBuffer d_out,
                                                                AnyResult dy, AnyResult dweights) {
  OperandCheck check("combine_experts_grad");
  Dim r{"R"}, w{"W"}, m{"M"}, k{"k"};
  check.Is("y", y, OperandCheck::kFloats, {&r, &w});
  check.Is("weights", weights, {::xla::ffi::F32}, {&m, &k});
  check.Is("slots", slots, {::xla::ffi::S32}, {&m, &k});
  check.Is("d_out", d_out, {y.element_type()}, {&m, &w});
  check.Is("dy", *dy, {y.element_type()}, {&r, &w});
  check.Is("dweights", *dweights, {::xla::ffi::F32}, {&m, &k});
  return check.Finish(CombineDims{r.size, w.size, m.size, k.size});
}

template <class Context>
auto BindCombineExpertsGrad() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()   // y
      .template Arg<AnyBuffer>()   // weights
      .template Arg<AnyBuffer>()   // slots
      .template Arg<AnyBuffer>()   // d_out
      .template Ret<AnyBuffer>()   // dy
      .template Ret<AnyBuffer>();  // dweights
}

}  // namespace jaxfp4

#endif  // JAXFP4_ROUTING_OPERANDS_H_
