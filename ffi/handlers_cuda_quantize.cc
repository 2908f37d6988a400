// The quantize custom calls on a GPU: bind, check, call.
#include <string>

#include "ffi/cuda/quantize.h"
#include "ffi/float_buffers.h"
#include "ffi/handlers.h"
#include "ffi/quantize_operands.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;
using cuda::QuantizeArgs;

// `set_results(args)` sets the results that hold the quantised values.
template <class SetResults>
ffi::Error Run(cudaStream_t stream, const char* call, const QuantizeOperands& in,
               const ffi::ErrorOr<QuantizeDims>& dims, AnyResult scale,
               const SetResults& set_results) {
  if (dims.has_error()) return dims.error();
  QuantizeArgs args = {};
  args.x = in.x.untyped_data();
  args.x_rows = dims->x_rows;
  args.depth = dims->depth;
  args.front_weight = DataOrNull<float>(in.front_weight);
  args.gather = DataOrNull<int32_t>(in.rows);
  args.amax = DataOrNull<float>(in.amax);
  args.group_sizes = DataOrNull<int32_t>(in.group_sizes);
  args.groups = dims->groups;
  args.rows = dims->rows;
  args.rows_per_scale = in.rows_per_scale;
  args.front = in.front;
  args.eps = in.eps;
  args.pow2_scale = in.pow2_scale;
  args.four_over_six = in.four_over_six;
  args.scale = scale->typed_data<float>();
  set_results(args);
  return ForFloatType(in.x.element_type(), [&](auto type) {
    const cudaError_t error = cuda::Quantize<decltype(type)>(stream, args);
    if (error == cudaSuccess) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(call) + ": " + cudaGetErrorString(error));
  });
}

ffi::Error Quantize(cudaStream_t stream, const QuantizeOperands& in, AnyResult codes,
                    AnyResult block_scales, AnyResult scale) {
  const auto dims = CheckQuantize(in, codes, block_scales, scale);
  return Run(stream, "quantize", in, dims, scale, [&](QuantizeArgs& args) {
    args.codes = codes->typed_data<uint8_t>();
    args.block_scales = static_cast<uint8_t*>(block_scales->untyped_data());
  });
}

ffi::Error QuantizeTiled(cudaStream_t stream, const QuantizeOperands& in, AnyResult codes,
                         AnyResult block_scales, AnyResult scale) {
  const auto dims = CheckQuantizeTiled(in, codes, block_scales, scale);
  return Run(stream, "quantize_tiled", in, dims, scale, [&](QuantizeArgs& args) {
    args.codes = codes->typed_data<uint8_t>();
    args.block_scales = block_scales->typed_data<uint8_t>();
    args.tiled_scale_bytes = static_cast<int64_t>(block_scales->element_count());
  });
}

ffi::Error QuantizeExpanded(cudaStream_t stream, const QuantizeOperands& in, AnyResult values,
                            AnyResult scale) {
  const auto dims = CheckQuantizeExpanded(in, values, scale);
  return Run(stream, "quantize_expanded", in, dims, scale, [&](QuantizeArgs& args) {
    args.values = static_cast<uint16_t*>(values->untyped_data());
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_quantize, QuantizeHandler(Quantize),
                              BindQuantize<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_quantize_tiled, QuantizeHandler(QuantizeTiled),
                              BindQuantize<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_quantize_expanded, QuantizeHandler(QuantizeExpanded),
                              BindQuantizeExpanded<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxfp4
