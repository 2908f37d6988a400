// The row-wise and routing custom calls on the CPU: bind, check, call. Leading axes are folded into
// rows by jaxfp4/rowwise.py.
#include "ffi/cpu/rowwise.h"
#include "ffi/float_buffers.h"
#include "ffi/handlers.h"
#include "ffi/routing_operands.h"
#include "ffi/rowwise_operands.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error RmsNormCall(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer weight, float eps,
                       AnyResult y) {
  ffi::ErrorOr<RowDims> dims = CheckRmsNorm(x, weight, y);
  if (dims.has_error()) return dims.error();
  return ForFloatType(x.element_type(), [&](auto type) {
    using T = decltype(type);
    cpu::RmsNormRows(pool, dims->rows, dims->width, FloatData<T>(x), weight.typed_data<float>(),
                     eps, FloatData<T>(y));
    return ffi::Error::Success();
  });
}

ffi::Error SwiGluCall(ffi::ThreadPool pool, AnyBuffer x, AnyResult y) {
  ffi::ErrorOr<RowDims> dims = CheckSwiGlu(x, y);
  if (dims.has_error()) return dims.error();
  return ForFloatType(x.element_type(), [&](auto type) {
    using T = decltype(type);
    cpu::SwiGluRows(pool, dims->rows, dims->width, FloatData<T>(x), FloatData<T>(y));
    return ffi::Error::Success();
  });
}

ffi::Error QkNormRope(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer weight, AnyBuffer positions,
                      AnyBuffer inv_freq, float eps, AnyResult y) {
  ffi::ErrorOr<QkNormRopeDims> dims = CheckQkNormRope(x, weight, positions, inv_freq, y);
  if (dims.has_error()) return dims.error();
  return ForFloatType(x.element_type(), [&](auto type) {
    using T = decltype(type);
    cpu::QkNormRopeArgs<T> args;
    args.tokens = dims->tokens;
    args.heads = dims->heads;
    args.head_dim = dims->head_dim;
    args.x = FloatData<T>(x);
    args.weight = DataOrNull<float>(weight);
    args.positions = positions.typed_data<int32_t>();
    args.inv_freq = inv_freq.typed_data<float>();
    args.eps = eps;
    args.y = FloatData<T>(y);
    cpu::QkNormRope(pool, args);
    return ffi::Error::Success();
  });
}

ffi::Error RouterTopK(ffi::ThreadPool pool, AnyBuffer logits, AnyBuffer given_experts,
                      bool norm_topk_prob, AnyResult weights, AnyResult experts) {
  ffi::ErrorOr<RouterDims> dims = CheckRouterTopK(logits, given_experts, weights, experts);
  if (dims.has_error()) return dims.error();
  cpu::RouterTopKArgs args;
  args.rows = dims->rows;
  args.num_experts = dims->num_experts;
  args.k = dims->k;
  args.logits = logits.typed_data<float>();
  args.given_experts = DataOrNull<int32_t>(given_experts);
  args.norm_topk_prob = norm_topk_prob;
  args.weights = weights->typed_data<float>();
  args.experts = experts->typed_data<int32_t>();
  cpu::RouterTopK(pool, args);
  return ffi::Error::Success();
}

template <class T>
cpu::CombineExpertsArgs<T> MakeCombineArgs(const CombineDims& dims, const AnyBuffer& y,
                                           const AnyBuffer& weights, const AnyBuffer& slots) {
  cpu::CombineExpertsArgs<T> args;
  args.y_rows = dims.y_rows;
  args.width = dims.width;
  args.rows = dims.rows;
  args.k = dims.k;
  args.y = FloatData<T>(y);
  args.weights = weights.typed_data<float>();
  args.slots = slots.typed_data<int32_t>();
  return args;
}

ffi::Error CombineExperts(ffi::ThreadPool pool, AnyBuffer y, AnyBuffer weights, AnyBuffer slots,
                          AnyResult out) {
  ffi::ErrorOr<CombineDims> dims = CheckCombineExperts(y, weights, slots, out);
  if (dims.has_error()) return dims.error();
  return ForFloatType(y.element_type(), [&](auto type) {
    using T = decltype(type);
    cpu::CombineExperts(pool, MakeCombineArgs<T>(*dims, y, weights, slots), FloatData<T>(out));
    return ffi::Error::Success();
  });
}

ffi::Error CombineExpertsGrad(ffi::ThreadPool pool, AnyBuffer y, AnyBuffer weights, AnyBuffer slots,
                              AnyBuffer d_out, AnyResult dy, AnyResult dweights) {
  ffi::ErrorOr<CombineDims> dims = CheckCombineExpertsGrad(y, weights, slots, d_out, dy, dweights);
  if (dims.has_error()) return dims.error();
  return ForFloatType(y.element_type(), [&](auto type) {
    using T = decltype(type);
    cpu::CombineExpertsGrad(pool, MakeCombineArgs<T>(*dims, y, weights, slots), FloatData<T>(d_out),
                            FloatData<T>(dy), dweights->typed_data<float>());
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_rmsnorm, RmsNormCall, BindRmsNorm<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_swiglu, SwiGluCall, BindSwiGlu<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_qk_norm_rope, QkNormRope,
                              BindQkNormRope<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_router_topk, RouterTopK,
                              BindRouterTopK<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_combine_experts, CombineExperts,
                              BindCombineExperts<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_combine_experts_grad, CombineExpertsGrad,
                              BindCombineExpertsGrad<ffi::ThreadPool>());

}  // namespace jaxfp4
