// The row-wise custom calls on the CPU: bind, check, call. Leading axes are folded into rows by
// jaxfp4/rowwise.py.
#include "ffi/cpu/rowwise.h"
#include "ffi/float_buffers.h"
#include "ffi/handlers.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;

using Float = ffi::AnyBuffer;  // bf16 or f32
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using FloatResult = ffi::Result<ffi::AnyBuffer>;
using F32Result = ffi::ResultBuffer<ffi::F32>;
using S32Result = ffi::ResultBuffer<ffi::S32>;

// An operand without elements is absent.
template <class Buffer>
auto DataOrNull(const Buffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data();
}

ffi::Error RmsNorm(ffi::ThreadPool pool, Float x, F32 weight, float eps, FloatResult y) {
  if (x.dimensions().size() != 2 || weight.element_count() != size_t(x.dimensions()[1])) {
    return ffi::Error::InvalidArgument("rmsnorm: x must be [rows, width] and weight [width]");
  }
  return ForFloatType(x.element_type(), "x", [&](auto type) {
    using T = decltype(type);
    cpu::RmsNormRows(pool, x.dimensions()[0], x.dimensions()[1], FloatData<T>(x),
                     weight.typed_data(), eps, FloatData<T>(y));
  });
}

ffi::Error SwiGlu(ffi::ThreadPool pool, Float x, FloatResult y) {
  if (x.dimensions().size() != 2 || x.dimensions()[1] % 2 != 0) {
    return ffi::Error::InvalidArgument("swiglu: x must be [rows, 2 * width]");
  }
  return ForFloatType(x.element_type(), "x", [&](auto type) {
    using T = decltype(type);
    cpu::SwiGluRows(pool, x.dimensions()[0], x.dimensions()[1] / 2, FloatData<T>(x),
                    FloatData<T>(y));
  });
}

ffi::Error QkNormRope(ffi::ThreadPool pool, Float x, F32 weight, S32 positions, F32 inv_freq,
                      float eps, FloatResult y) {
  const auto dims = x.dimensions();
  if (dims.size() != 3 || dims[2] % 2 != 0 ||
      (weight.element_count() != 0 && weight.element_count() != size_t(dims[2])) ||
      positions.element_count() != size_t(dims[0]) ||
      inv_freq.element_count() != size_t(dims[2] / 2)) {
    return ffi::Error::InvalidArgument(
        "qk_norm_rope: x must be [tokens, heads, head_dim], weight [head_dim] or [0], positions "
        "[tokens] and inv_freq [head_dim / 2]");
  }
  return ForFloatType(x.element_type(), "x", [&](auto type) {
    using T = decltype(type);
    cpu::QkNormRopeArgs<T> args;
    args.tokens = dims[0];
    args.heads = dims[1];
    args.head_dim = dims[2];
    args.x = FloatData<T>(x);
    args.weight = DataOrNull(weight);
    args.positions = positions.typed_data();
    args.inv_freq = inv_freq.typed_data();
    args.eps = eps;
    args.y = FloatData<T>(y);
    cpu::QkNormRope(pool, args);
  });
}

ffi::Error RouterTopK(ffi::ThreadPool pool, F32 logits, S32 given_experts, bool norm_topk_prob,
                      F32Result weights, S32Result experts) {
  const auto dims = logits.dimensions();
  const auto out_dims = weights->dimensions();
  if (dims.size() != 2 || out_dims.size() != 2 || out_dims[0] != dims[0] || out_dims[1] > dims[1] ||
      experts->element_count() != weights->element_count() ||
      (given_experts.element_count() != 0 &&
       given_experts.element_count() != weights->element_count())) {
    return ffi::Error::InvalidArgument(
        "router_topk: logits must be [rows, num_experts], weights and experts [rows, k] with k at "
        "most num_experts");
  }
  cpu::RouterTopKArgs args;
  args.rows = dims[0];
  args.num_experts = dims[1];
  args.k = out_dims[1];
  args.logits = logits.typed_data();
  args.given_experts = DataOrNull(given_experts);
  args.norm_topk_prob = norm_topk_prob;
  args.weights = weights->typed_data();
  args.experts = experts->typed_data();
  cpu::RouterTopK(pool, args);
  return ffi::Error::Success();
}

template <class T>
cpu::CombineExpertsArgs<T> MakeCombineArgs(const Float& y, const F32& weights, const S32& slots) {
  cpu::CombineExpertsArgs<T> args;
  args.y_rows = y.dimensions()[0];
  args.width = y.dimensions()[1];
  args.rows = weights.dimensions()[0];
  args.k = weights.dimensions()[1];
  args.y = FloatData<T>(y);
  args.weights = weights.typed_data();
  args.slots = slots.typed_data();
  return args;
}

ffi::Error CheckCombine(const Float& y, const F32& weights, const S32& slots) {
  if (y.dimensions().size() != 2 || weights.dimensions().size() != 2 ||
      slots.element_count() != weights.element_count()) {
    return ffi::Error::InvalidArgument(
        "combine_experts: y must be [y_rows, width], weights and slots [rows, k]");
  }
  return ffi::Error::Success();
}

ffi::Error CombineExperts(ffi::ThreadPool pool, Float y, F32 weights, S32 slots, FloatResult out) {
  if (ffi::Error error = CheckCombine(y, weights, slots); error.failure()) return error;
  return ForFloatType(y.element_type(), "y", [&](auto type) {
    using T = decltype(type);
    cpu::CombineExperts(pool, MakeCombineArgs<T>(y, weights, slots), FloatData<T>(out));
  });
}

ffi::Error CombineExpertsGrad(ffi::ThreadPool pool, Float y, F32 weights, S32 slots, Float d_out,
                              FloatResult dy, F32Result dweights) {
  if (ffi::Error error = CheckCombine(y, weights, slots); error.failure()) return error;
  if (d_out.element_type() != y.element_type() ||
      d_out.element_count() != size_t(weights.dimensions()[0] * y.dimensions()[1])) {
    return ffi::Error::InvalidArgument("combine_experts_grad: d_out must be [rows, width] like y");
  }
  return ForFloatType(y.element_type(), "y", [&](auto type) {
    using T = decltype(type);
    cpu::CombineExpertsGrad(pool, MakeCombineArgs<T>(y, weights, slots), FloatData<T>(d_out),
                            FloatData<T>(dy), dweights->typed_data());
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_rmsnorm, RmsNorm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Float>()  // x [rows, width]
                                  .Arg<F32>()    // weight [width]
                                  .Attr<float>("eps")
                                  .Ret<ffi::AnyBuffer>());  // y like x

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_swiglu, SwiGlu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Float>()             // x [rows, 2 * width], gate first
                                  .Ret<ffi::AnyBuffer>());  // y [rows, width]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_qk_norm_rope, QkNormRope,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Float>()  // x [tokens, heads, head_dim]
                                  .Arg<F32>()    // weight [head_dim], or [0]: no norm
                                  .Arg<S32>()    // positions [tokens]
                                  .Arg<F32>()    // inv_freq [head_dim / 2]
                                  .Attr<float>("eps")
                                  .Ret<ffi::AnyBuffer>());  // y like x

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_router_topk, RouterTopK,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()  // logits [rows, num_experts]
                                  .Arg<S32>()  // given_experts [rows, k], or [0]: choose
                                  .Attr<bool>("norm_topk_prob")
                                  .Ret<F32>()    // weights [rows, k]
                                  .Ret<S32>());  // experts [rows, k]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_combine_experts, CombineExperts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Float>()             // y [y_rows, width]
                                  .Arg<F32>()               // weights [rows, k]
                                  .Arg<S32>()               // slots [rows, k]
                                  .Ret<ffi::AnyBuffer>());  // out [rows, width], like y

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_combine_experts_grad, CombineExpertsGrad,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Float>()           // y [y_rows, width]
                                  .Arg<F32>()             // weights [rows, k]
                                  .Arg<S32>()             // slots [rows, k]
                                  .Arg<Float>()           // d_out [rows, width], like y
                                  .Ret<ffi::AnyBuffer>()  // dy like y
                                  .Ret<F32>());           // dweights [rows, k]

}  // namespace jaxfp4
