// The attention custom calls on the CPU: bind, check, call.
#include "ffi/attention_operands.h"
#include "ffi/cpu/attention.h"
#include "ffi/float_buffers.h"
#include "ffi/handlers.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;

template <class T>
cpu::AttentionInput<T> MakeInput(const AttentionShape& shape, const AttentionOperands& in,
                                 float scale) {
  return {shape,
          FloatData<T>(in.q),
          FloatData<T>(in.k),
          FloatData<T>(in.v),
          in.key_start.typed_data<int32_t>(),
          in.key_end.typed_data<int32_t>(),
          scale};
}

ffi::Error Attention(ffi::ThreadPool pool, AnyBuffer q, AnyBuffer k, AnyBuffer v,
                     AnyBuffer key_start, AnyBuffer key_end, float scale, AnyResult o,
                     AnyResult lse) {
  const AttentionOperands in = {q, k, v, key_start, key_end};
  ffi::ErrorOr<AttentionShape> shape = CheckAttention(in, o, lse);
  if (shape.has_error()) return shape.error();
  return ForFloatType(q.element_type(), [&](auto type) {
    using T = decltype(type);
    cpu::Attention(pool, MakeInput<T>(*shape, in, scale), FloatData<T>(o),
                   lse->typed_data<float>());
    return ffi::Error::Success();
  });
}

ffi::Error AttentionGrad(ffi::ThreadPool pool, AnyBuffer q, AnyBuffer k, AnyBuffer v,
                         AnyBuffer key_start, AnyBuffer key_end, AnyBuffer o, AnyBuffer lse,
                         AnyBuffer d_o, float scale, AnyResult dq, AnyResult dk, AnyResult dv) {
  const AttentionOperands in = {q, k, v, key_start, key_end};
  ffi::ErrorOr<AttentionShape> shape = CheckAttentionGrad(in, o, lse, d_o, dq, dk, dv);
  if (shape.has_error()) return shape.error();
  return ForFloatType(q.element_type(), [&](auto type) {
    using T = decltype(type);
    cpu::AttentionGradArgs<T> args;
    args.in = MakeInput<T>(*shape, in, scale);
    args.o = FloatData<T>(o);
    args.lse = lse.typed_data<float>();
    args.d_o = FloatData<T>(d_o);
    args.dq = FloatData<T>(dq);
    args.dk = FloatData<T>(dk);
    args.dv = FloatData<T>(dv);
    cpu::AttentionGrad(pool, args);
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_attention, Attention, BindAttention<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_attention_grad, AttentionGrad,
                              BindAttentionGrad<ffi::ThreadPool>());

}  // namespace jaxfp4
