// What attention and attention_grad take and return, and which of it is legal.
#ifndef JAXFP4_ATTENTION_OPERANDS_H_
#define JAXFP4_ATTENTION_OPERANDS_H_

#include <string>

#include "ffi/attention_shape.h"
#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfp4 {

// What both calls take.
struct AttentionOperands {
  AnyBuffer q;          // bf16|f32 [B, T, Hq, D]
  AnyBuffer k;          // like q [B, S, Hk, D], Hk a divisor of Hq
  AnyBuffer v;          // like k
  AnyBuffer key_start;  // s32 [B, T]
  AnyBuffer key_end;    // s32 [B, T]
};

namespace internal {

struct AttentionDims {
  Dim b{"B"}, t{"T"}, s{"S"}, heads{"Hq"}, kv_heads{"Hk"}, d{"D"};

  AttentionShape shape() const {
    return {b.size, t.size, s.size, heads.size, kv_heads.size, d.size};
  }
};

inline void CheckAttentionOperands(OperandCheck& check, const AttentionOperands& in,
                                   AttentionDims* dims) {
  const auto type = in.q.element_type();
  auto& [b, t, s, heads, kv_heads, d] = *dims;
  check.Is("q", in.q, OperandCheck::kFloats, {&b, &t, &heads, &d});
  check.Is("k", in.k, {type}, {&b, &s, &kv_heads, &d});
  if (check.ok() && (kv_heads.size == 0 || heads.size % kv_heads.size != 0)) {
    check.Refuse("k", in.k,
                 "[B, S, Hk, D] with Hk a divisor of q's " + std::to_string(heads.size) + " heads");
  }
  check.Is("v", in.v, {type}, {&b, &s, &kv_heads, &d});
  check.Is("key_start", in.key_start, {::xla::ffi::S32}, {&b, &t});
  check.Is("key_end", in.key_end, {::xla::ffi::S32}, {&b, &t});
}

}  // namespace internal

// o like q, lse f32 [B, T, Hq].
inline ::xla::ffi::ErrorOr<AttentionShape> CheckAttention(const AttentionOperands& in, AnyResult o,
                                                          AnyResult lse) {
  OperandCheck check("attention");
  internal::AttentionDims dims;
  internal::CheckAttentionOperands(check, in, &dims);
  auto& [b, t, s, heads, kv_heads, d] = dims;
  check.Is("o", *o, {in.q.element_type()}, {&b, &t, &heads, &d});
  check.Is("lse", *lse, {::xla::ffi::F32}, {&b, &t, &heads});
  return check.Finish(dims.shape());
}

template <class Context>
auto BindAttention() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()  // q
      .template Arg<AnyBuffer>()  // k
      .template Arg<AnyBuffer>()  // v
      .template Arg<AnyBuffer>()  // key_start
      .template Arg<AnyBuffer>()  // key_end
      .template Attr<float>("scale")
      .template Ret<AnyBuffer>()   // o
      .template Ret<AnyBuffer>();  // lse
}

// o, lse: what attention returned; d_o and dq like q, dk and dv like k.
inline ::xla::ffi::ErrorOr<AttentionShape> CheckAttentionGrad(const AttentionOperands& in,
                                                              AnyBuffer o, AnyBuffer lse,
                                                              AnyBuffer d_o, AnyResult dq,
                                                              AnyResult dk, AnyResult dv) {
  OperandCheck check("attention_grad");
  internal::AttentionDims dims;
  internal::CheckAttentionOperands(check, in, &dims);
  auto& [b, t, s, heads, kv_heads, d] = dims;
  const auto type = in.q.element_type();
  check.Is("o", o, {type}, {&b, &t, &heads, &d});
  check.Is("lse", lse, {::xla::ffi::F32}, {&b, &t, &heads});
  check.Is("do", d_o, {type}, {&b, &t, &heads, &d});
  check.Is("dq", *dq, {type}, {&b, &t, &heads, &d});
  check.Is("dk", *dk, {type}, {&b, &s, &kv_heads, &d});
  check.Is("dv", *dv, {type}, {&b, &s, &kv_heads, &d});
  return check.Finish(dims.shape());
}

template <class Context>
auto BindAttentionGrad() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()  // q
      .template Arg<AnyBuffer>()  // k
      .template Arg<AnyBuffer>()  // v
      .template Arg<AnyBuffer>()  // key_start
      .template Arg<AnyBuffer>()  // key_end
      .template Arg<AnyBuffer>()  // o
      .template Arg<AnyBuffer>()  // lse
      .template Arg<AnyBuffer>()  // do
      .template Attr<float>("scale")
      .template Ret<AnyBuffer>()   // dq
      .template Ret<AnyBuffer>()   // dk
      .template Ret<AnyBuffer>();  // dv
}

}  // namespace jaxfp4

#endif  // JAXFP4_ATTENTION_OPERANDS_H_
