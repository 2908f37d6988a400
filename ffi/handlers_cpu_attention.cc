// The attention custom calls on the CPU: bind, check, call.
#include <algorithm>

#include "ffi/cpu/attention.h"
#include "ffi/float_buffers.h"
#include "ffi/handlers.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;

using Float = ffi::AnyBuffer;  // bf16 or f32
using S32 = ffi::Buffer<ffi::S32>;
using FloatResult = ffi::Result<ffi::AnyBuffer>;
using F32Result = ffi::ResultBuffer<ffi::F32>;

// The operands of both calls but for the types and the data.
ffi::ErrorOr<cpu::AttentionShape> ReadShape(const Float& q, const Float& k, const Float& v,
                                            const S32& key_start, const S32& key_end) {
  const auto q_dims = q.dimensions(), k_dims = k.dimensions(), v_dims = v.dimensions();
  if (q_dims.size() != 4 || k_dims.size() != 4 ||
      !std::equal(k_dims.begin(), k_dims.end(), v_dims.begin(), v_dims.end()) ||
      q_dims[0] != k_dims[0] || q_dims[3] != k_dims[3] || k_dims[2] == 0 ||
      q_dims[2] % k_dims[2] != 0 || key_start.element_count() != size_t(q_dims[0] * q_dims[1]) ||
      key_end.element_count() != key_start.element_count() ||
      k.element_type() != q.element_type() || v.element_type() != q.element_type()) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "attention: q must be [batch, queries, heads, head_dim], k and v [batch, slots, kv_heads, "
        "head_dim] of q's type with kv_heads a divisor of heads, key_start and key_end [batch, "
        "queries]"));
  }
  return cpu::AttentionShape{q_dims[0], q_dims[1], k_dims[1], q_dims[2], k_dims[2], q_dims[3]};
}

template <class T>
cpu::AttentionInput<T> MakeInput(const cpu::AttentionShape& shape, const Float& q, const Float& k,
                                 const Float& v, const S32& key_start, const S32& key_end,
                                 float scale) {
  return {shape,
          FloatData<T>(q),
          FloatData<T>(k),
          FloatData<T>(v),
          key_start.typed_data(),
          key_end.typed_data(),
          scale};
}

ffi::Error Attention(ffi::ThreadPool pool, Float q, Float k, Float v, S32 key_start, S32 key_end,
                     float scale, FloatResult o, F32Result lse) {
  ffi::ErrorOr<cpu::AttentionShape> shape = ReadShape(q, k, v, key_start, key_end);
  if (shape.has_error()) return shape.error();
  return ForFloatType(q.element_type(), "q", [&](auto type) {
    using T = decltype(type);
    cpu::Attention(pool, MakeInput<T>(*shape, q, k, v, key_start, key_end, scale), FloatData<T>(o),
                   lse->typed_data());
  });
}

ffi::Error AttentionGrad(ffi::ThreadPool pool, Float q, Float k, Float v, S32 key_start,
                         S32 key_end, Float o, ffi::Buffer<ffi::F32> lse, Float d_o, float scale,
                         FloatResult dq, FloatResult dk, FloatResult dv) {
  ffi::ErrorOr<cpu::AttentionShape> shape = ReadShape(q, k, v, key_start, key_end);
  if (shape.has_error()) return shape.error();
  if (o.element_type() != q.element_type() || o.element_count() != q.element_count() ||
      d_o.element_type() != q.element_type() || d_o.element_count() != q.element_count() ||
      lse.element_count() != size_t(shape->batch * shape->queries * shape->heads)) {
    return ffi::Error::InvalidArgument(
        "attention_grad: o and do must be like q, lse f32 [batch, queries, heads]");
  }
  return ForFloatType(q.element_type(), "q", [&](auto type) {
    using T = decltype(type);
    cpu::AttentionGradArgs<T> args;
    args.in = MakeInput<T>(*shape, q, k, v, key_start, key_end, scale);
    args.o = FloatData<T>(o);
    args.lse = lse.typed_data();
    args.d_o = FloatData<T>(d_o);
    args.dq = FloatData<T>(dq);
    args.dk = FloatData<T>(dk);
    args.dv = FloatData<T>(dv);
    cpu::AttentionGrad(pool, args);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_attention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Float>()  // q [batch, queries, heads, head_dim]
                                  .Arg<Float>()  // k [batch, slots, kv_heads, head_dim]
                                  .Arg<Float>()  // v like k
                                  .Arg<S32>()    // key_start [batch, queries]
                                  .Arg<S32>()    // key_end [batch, queries]
                                  .Attr<float>("scale")
                                  .Ret<ffi::AnyBuffer>()           // o like q
                                  .Ret<ffi::Buffer<ffi::F32>>());  // lse [batch, queries, heads]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_attention_grad, AttentionGrad,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Float>()                  // q
                                  .Arg<Float>()                  // k
                                  .Arg<Float>()                  // v
                                  .Arg<S32>()                    // key_start
                                  .Arg<S32>()                    // key_end
                                  .Arg<Float>()                  // o, from attention
                                  .Arg<ffi::Buffer<ffi::F32>>()  // lse, from attention
                                  .Arg<Float>()                  // do like q
                                  .Attr<float>("scale")
                                  .Ret<ffi::AnyBuffer>()    // dq like q
                                  .Ret<ffi::AnyBuffer>()    // dk like k
                                  .Ret<ffi::AnyBuffer>());  // dv like k

}  // namespace jaxfp4
