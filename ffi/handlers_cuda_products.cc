// The product custom calls on a GPU: bind, check, launch.
#include <optional>
#include <string>

#include "ffi/cuda/bf16_gemm.h"
#include "ffi/cuda/launch_status.h"
#include "ffi/handlers.h"
#include "ffi/product_operands.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;

using Stream = ffi::PlatformStream<cudaStream_t>;

// What the copy engine and the tensor cores ask for beyond the checks of every platform.
ffi::Error CheckForGpu(const char* call, ffi::DataType type, const ProductDims& dims) {
  if (type != ffi::BF16) {
    return ffi::Error::InvalidArgument(
        std::string(call) +
        ": a GPU multiplies bf16 operands; for fp32 ones pass implementation=\"reference\"");
  }
  if (dims.n % 8 != 0 || dims.k % 8 != 0) {
    return ffi::Error::InvalidArgument(
        std::string(call) + ": on a GPU the weight's sides must be multiples of 8, not " +
        std::to_string(dims.n) + " x " + std::to_string(dims.k));
  }
  return ffi::Error::Success();
}

cuda::Gemm MakeGemm(const ProductDims& dims, const AnyBuffer& a, const AnyBuffer& b, AnyResult y,
                    std::optional<Grouping>& grouping) {
  cuda::Gemm gemm;
  gemm.a = static_cast<const uint16_t*>(a.untyped_data());
  gemm.b = static_cast<const uint16_t*>(b.untyped_data());
  gemm.y = y->untyped_data();
  gemm.y_is_fp32 = y->element_type() == ffi::F32;
  gemm.groups = dims.groups;
  gemm.rows = dims.m;
  gemm.outputs = dims.n;
  gemm.inputs = dims.k;
  if (grouping) gemm.group_sizes = grouping->group_sizes.typed_data<int32_t>();
  return gemm;
}

ffi::Error Product(cudaStream_t stream, AnyBuffer a, AnyBuffer b, AnyBuffer a_scale,
                   AnyBuffer b_scale, AnyResult y, std::optional<Grouping> grouping) {
  const char* call = grouping ? "grouped_matmul" : "matmul";
  ffi::ErrorOr<ProductDims> dims = CheckMatmul(a, b, a_scale, b_scale, y, grouping);
  if (dims.has_error()) return dims.error();
  ffi::Error error = CheckForGpu(call, a.element_type(), *dims);
  if (error.failure()) return error;
  cuda::Gemm gemm = MakeGemm(*dims, a, b, y, grouping);
  gemm.a_scale = {DataOrNull<float>(a_scale), dims->a_scales};
  gemm.b_scale = {DataOrNull<float>(b_scale), dims->b_scales_per_group * dims->groups};
  return cuda::LaunchStatus(call, cuda::GemmForward(gemm, stream));
}

ffi::Error InputGradient(cudaStream_t stream, AnyBuffer g, AnyBuffer w, AnyResult dx,
                         std::optional<Grouping> grouping) {
  const char* call = grouping ? "grouped_matmul_dx" : "matmul_dx";
  ffi::ErrorOr<ProductDims> dims = CheckMatmulDx(g, w, dx, grouping);
  if (dims.has_error()) return dims.error();
  ffi::Error error = CheckForGpu(call, g.element_type(), *dims);
  if (error.failure()) return error;
  return cuda::LaunchStatus(call,
                            cuda::GemmInputGradient(MakeGemm(*dims, g, w, dx, grouping), stream));
}

ffi::Error WeightGradient(cudaStream_t stream, AnyBuffer g, AnyBuffer x, AnyResult dw,
                          std::optional<Grouping> grouping) {
  const char* call = grouping ? "grouped_matmul_dw" : "matmul_dw";
  ffi::ErrorOr<ProductDims> dims = CheckMatmulDw(g, x, dw, grouping);
  if (dims.has_error()) return dims.error();
  ffi::Error error = CheckForGpu(call, g.element_type(), *dims);
  if (error.failure()) return error;
  return cuda::LaunchStatus(call,
                            cuda::GemmWeightGradient(MakeGemm(*dims, g, x, dw, grouping), stream));
}

ffi::Error Matmul(cudaStream_t stream, AnyBuffer a, AnyBuffer b, AnyBuffer a_scale,
                  AnyBuffer b_scale, AnyResult y) {
  return Product(stream, a, b, a_scale, b_scale, y, std::nullopt);
}

ffi::Error GroupedMatmul(cudaStream_t stream, AnyBuffer a, AnyBuffer b, AnyBuffer a_scale,
                         AnyBuffer b_scale, AnyBuffer group_sizes, AnyResult y,
                         AnyResult workspace) {
  return Product(stream, a, b, a_scale, b_scale, y, Grouping{group_sizes, workspace});
}

ffi::Error MatmulDx(cudaStream_t stream, AnyBuffer g, AnyBuffer w, AnyResult dx) {
  return InputGradient(stream, g, w, dx, std::nullopt);
}

ffi::Error GroupedMatmulDx(cudaStream_t stream, AnyBuffer g, AnyBuffer w, AnyBuffer group_sizes,
                           AnyResult dx, AnyResult workspace) {
  return InputGradient(stream, g, w, dx, Grouping{group_sizes, workspace});
}

ffi::Error MatmulDw(cudaStream_t stream, AnyBuffer g, AnyBuffer x, AnyResult dw) {
  return WeightGradient(stream, g, x, dw, std::nullopt);
}

ffi::Error GroupedMatmulDw(cudaStream_t stream, AnyBuffer g, AnyBuffer x, AnyBuffer group_sizes,
                           AnyResult dw, AnyResult workspace) {
  return WeightGradient(stream, g, x, dw, Grouping{group_sizes, workspace});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_matmul, Matmul, BindMatmul<Stream>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_grouped_matmul, GroupedMatmul,
                              BindGroupedMatmul<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_matmul_dx, MatmulDx, BindMatmulGrad<Stream>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_grouped_matmul_dx, GroupedMatmulDx,
                              BindGroupedMatmulGrad<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_matmul_dw, MatmulDw, BindMatmulGrad<Stream>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_grouped_matmul_dw, GroupedMatmulDw,
                              BindGroupedMatmulGrad<Stream>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxfp4
