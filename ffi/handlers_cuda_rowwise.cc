// The row-wise and routing custom calls on a GPU: bind, check, launch.
#include <limits>
#include <string>

#include "ffi/cuda/launch_status.h"
#include "ffi/cuda/routing.h"
#include "ffi/cuda/rowwise.h"
#include "ffi/float_buffers.h"
#include "ffi/handlers.h"
#include "ffi/routing_operands.h"
#include "ffi/rowwise_operands.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;

using Stream = ffi::PlatformStream<cudaStream_t>;

ffi::Error RmsNormCall(cudaStream_t stream, AnyBuffer x, AnyBuffer weight, float eps, AnyResult y) {
  ffi::ErrorOr<RowDims> dims = CheckRmsNorm(x, weight, y);
  if (dims.has_error()) return dims.error();
  return ForFloatType(x.element_type(), [&](auto type) {
    using T = decltype(type);
    return cuda::LaunchStatus("rmsnorm",
                              cuda::RmsNormRows(stream, dims->rows, dims->width, FloatData<T>(x),
                                                weight.typed_data<float>(), eps, FloatData<T>(y)));
  });
}

ffi::Error SwiGluCall(cudaStream_t stream, AnyBuffer x, AnyResult y) {
  ffi::ErrorOr<RowDims> dims = CheckSwiGlu(x, y);
  if (dims.has_error()) return dims.error();
  return ForFloatType(x.element_type(), [&](auto type) {
    using T = decltype(type);
    return cuda::LaunchStatus("swiglu", cuda::SwiGluRows(stream, dims->rows, dims->width,
                                                         FloatData<T>(x), FloatData<T>(y)));
  });
}

ffi::Error QkNormRope(cudaStream_t stream, AnyBuffer x, AnyBuffer weight, AnyBuffer positions,
                      AnyBuffer inv_freq, float eps, AnyResult y) {
  ffi::ErrorOr<QkNormRopeDims> dims = CheckQkNormRope(x, weight, positions, inv_freq, y);
  if (dims.has_error()) return dims.error();
  if (dims->head_dim > cuda::kLargestHeadDim) {
    return ffi::Error::InvalidArgument("qk_norm_rope: a GPU takes heads of up to " +
                                       std::to_string(cuda::kLargestHeadDim) + " values, not " +
                                       std::to_string(dims->head_dim));
  }
  return ForFloatType(x.element_type(), [&](auto type) {
    using T = decltype(type);
    cuda::QkNormRopeArgs<T> args;
    args.tokens = dims->tokens;
    args.heads = dims->heads;
    args.head_dim = dims->head_dim;
    args.x = FloatData<T>(x);
    args.weight = DataOrNull<float>(weight);
    args.positions = positions.typed_data<int32_t>();
    args.inv_freq = inv_freq.typed_data<float>();
    args.eps = eps;
    args.y = FloatData<T>(y);
    return cuda::LaunchStatus("qk_norm_rope", cuda::QkNormRope(stream, args));
  });
}

ffi::Error RouterTopK(cudaStream_t stream, AnyBuffer logits, AnyBuffer given_experts,
                      bool norm_topk_prob, AnyResult weights, AnyResult experts) {
  ffi::ErrorOr<RouterDims> dims = CheckRouterTopK(logits, given_experts, weights, experts);
  if (dims.has_error()) return dims.error();
  if (dims->num_experts + dims->k > cuda::kLargestRouterRow) {
    return ffi::Error::InvalidArgument("router_topk: a GPU takes num_experts + k up to " +
                                       std::to_string(cuda::kLargestRouterRow) + ", not " +
                                       std::to_string(dims->num_experts) + " + " +
                                       std::to_string(dims->k));
  }
  cuda::RouterTopKArgs args;
  args.rows = dims->rows;
  args.num_experts = dims->num_experts;
  args.k = dims->k;
  args.logits = logits.typed_data<float>();
  args.given_experts = DataOrNull<int32_t>(given_experts);
  args.norm_topk_prob = norm_topk_prob;
  args.weights = weights->typed_data<float>();
  args.experts = experts->typed_data<int32_t>();
  return cuda::LaunchStatus("router_topk", cuda::RouterTopK(stream, args));
}

template <class T>
cuda::CombineExpertsArgs<T> MakeCombineArgs(const CombineDims& dims, const AnyBuffer& y,
                                            const AnyBuffer& weights, const AnyBuffer& slots) {
  cuda::CombineExpertsArgs<T> args;
  args.y_rows = dims.y_rows;
  args.width = dims.width;
  args.rows = dims.rows;
  args.k = dims.k;
  args.y = FloatData<T>(y);
  args.weights = weights.typed_data<float>();
  args.slots = slots.typed_data<int32_t>();
  return args;
}

// Slots are int32, and so are the kernels' indices into weights.
ffi::Error CheckCombineSizes(const char* call, const CombineDims& dims) {
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  if (dims.y_rows > kLargest || dims.rows * dims.k > kLargest) {
    return ffi::Error::InvalidArgument(
        std::string(call) + ": y has " + std::to_string(dims.y_rows) + " rows and weights " +
        std::to_string(dims.rows * dims.k) + " elements; a GPU takes up to 2^31 - 1 of each");
  }
  return ffi::Error::Success();
}

ffi::Error CombineExperts(cudaStream_t stream, AnyBuffer y, AnyBuffer weights, AnyBuffer slots,
                          AnyResult out) {
  ffi::ErrorOr<CombineDims> dims = CheckCombineExperts(y, weights, slots, out);
  if (dims.has_error()) return dims.error();
  ffi::Error sizes = CheckCombineSizes("combine_experts", *dims);
  if (sizes.failure()) return sizes;
  return ForFloatType(y.element_type(), [&](auto type) {
    using T = decltype(type);
    return cuda::LaunchStatus(
        "combine_experts",
        cuda::CombineExperts(stream, MakeCombineArgs<T>(*dims, y, weights, slots),
                             FloatData<T>(out)));
  });
}

ffi::Error CombineExpertsGrad(cudaStream_t stream, AnyBuffer y, AnyBuffer weights, AnyBuffer slots,
                              AnyBuffer d_out, AnyResult dy, AnyResult dweights) {
  ffi::ErrorOr<CombineDims> dims = CheckCombineExpertsGrad(y, weights, slots, d_out, dy, dweights);
  if (dims.has_error()) return dims.error();
  ffi::Error sizes = CheckCombineSizes("combine_experts_grad", *dims);
  if (sizes.failure()) return sizes;
  return ForFloatType(y.element_type(), [&](auto type) {
    using T = decltype(type);
    return cuda::LaunchStatus(
        "combine_experts_grad",
        cuda::CombineExpertsGrad(stream, MakeCombineArgs<T>(*dims, y, weights, slots),
                                 FloatData<T>(d_out), FloatData<T>(dy),
                                 dweights->typed_data<float>()));
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_rmsnorm, RmsNormCall, BindRmsNorm<Stream>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_swiglu, SwiGluCall, BindSwiGlu<Stream>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_qk_norm_rope, QkNormRope, BindQkNormRope<Stream>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_router_topk, RouterTopK, BindRouterTopK<Stream>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_combine_experts, CombineExperts,
                              BindCombineExperts<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_combine_experts_grad, CombineExpertsGrad,
                              BindCombineExpertsGrad<Stream>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxfp4
