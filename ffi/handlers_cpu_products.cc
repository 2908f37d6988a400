// The product custom calls on the CPU: bind, check, call.
//
// The grouped calls' workspace is for GPU kernels; the CPU leaves it alone.
#include <optional>

#include "ffi/cpu/groups.h"
#include "ffi/cpu/products.h"
#include "ffi/float_buffers.h"
#include "ffi/handlers.h"
#include "ffi/product_operands.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;
using cpu::Groups;
using cpu::Nvfp4RowMajor;
using cpu::RowMajor;
using cpu::Scales;

Scales ScalesOf(const AnyBuffer& buffer) {
  return {DataOrNull<float>(buffer), static_cast<int64_t>(buffer.element_count())};
}

// Of a checked call. A dense product is one group that holds every row.
ffi::ErrorOr<Groups> GroupsOf(const std::optional<Grouping>& grouping, const ProductDims& dims) {
  if (grouping) return cpu::ReadGroups(grouping->group_sizes, dims.m);
  return Groups{{0, dims.m}};
}

// Calls run(In(), Out()) with the types of an operand and a result.
template <class Run>
ffi::Error WithTypes(const AnyBuffer& in, AnyResult out, const Run& run) {
  return ForFloatType(in.element_type(), [&](auto in_type) {
    return ForFloatType(out->element_type(), [&](auto out_type) {
      run(in_type, out_type);
      return ffi::Error::Success();
    });
  });
}

ffi::Error Nvfp4Product(ffi::ThreadPool& pool, AnyBuffer a_codes, AnyBuffer a_block_scales,
                        AnyBuffer a_scale, AnyBuffer b_codes, AnyBuffer b_block_scales,
                        AnyBuffer b_scale, AnyResult y, std::optional<Grouping> grouping) {
  ffi::ErrorOr<ProductDims> dims = CheckNvfp4Matmul(a_codes, a_block_scales, a_scale, b_codes,
                                                    b_block_scales, b_scale, y, grouping);
  if (dims.has_error()) return dims.error();
  ffi::ErrorOr<Groups> groups = GroupsOf(grouping, *dims);
  if (groups.has_error()) return groups.error();
  const Nvfp4RowMajor a{a_codes.typed_data<uint8_t>(),
                        static_cast<const uint8_t*>(a_block_scales.untyped_data()), dims->k};
  const auto b = [&](int64_t group) {
    const int64_t first = group * dims->n * dims->k;
    return Nvfp4RowMajor{
        b_codes.typed_data<uint8_t>() + first / 2,
        static_cast<const uint8_t*>(b_block_scales.untyped_data()) + first / kBlock, dims->k};
  };
  return ForFloatType(y->element_type(), [&](auto out) {
    cpu::Forward(pool, *groups, dims->m, dims->n, dims->k, a, b, ScalesOf(a_scale),
                 ScalesOf(b_scale), FloatData<decltype(out)>(y));
    return ffi::Error::Success();
  });
}

ffi::Error Product(ffi::ThreadPool& pool, AnyBuffer a, AnyBuffer b, AnyBuffer a_scale,
                   AnyBuffer b_scale, AnyResult y, std::optional<Grouping> grouping) {
  ffi::ErrorOr<ProductDims> dims = CheckMatmul(a, b, a_scale, b_scale, y, grouping);
  if (dims.has_error()) return dims.error();
  ffi::ErrorOr<Groups> groups = GroupsOf(grouping, *dims);
  if (groups.has_error()) return groups.error();
  return WithTypes(a, y, [&](auto in, auto out) {
    using T = decltype(in);
    const auto matrix_b = [&](int64_t group) {
      return RowMajor<T>{FloatData<T>(b) + group * dims->n * dims->k, dims->k};
    };
    cpu::Forward(pool, *groups, dims->m, dims->n, dims->k, RowMajor<T>{FloatData<T>(a), dims->k},
                 matrix_b, ScalesOf(a_scale), ScalesOf(b_scale), FloatData<decltype(out)>(y));
  });
}

ffi::Error InputGradient(ffi::ThreadPool& pool, AnyBuffer g, AnyBuffer w, AnyResult dx,
                         std::optional<Grouping> grouping) {
  ffi::ErrorOr<ProductDims> dims = CheckMatmulDx(g, w, dx, grouping);
  if (dims.has_error()) return dims.error();
  ffi::ErrorOr<Groups> groups = GroupsOf(grouping, *dims);
  if (groups.has_error()) return groups.error();
  return WithTypes(g, dx, [&](auto in, auto out) {
    using T = decltype(in);
    cpu::BackwardInput(pool, *groups, dims->m, dims->n, dims->k, FloatData<T>(g), FloatData<T>(w),
                       FloatData<decltype(out)>(dx));
  });
}

ffi::Error WeightGradient(ffi::ThreadPool& pool, AnyBuffer g, AnyBuffer x, AnyResult dw,
                          std::optional<Grouping> grouping) {
  ffi::ErrorOr<ProductDims> dims = CheckMatmulDw(g, x, dw, grouping);
  if (dims.has_error()) return dims.error();
  ffi::ErrorOr<Groups> groups = GroupsOf(grouping, *dims);
  if (groups.has_error()) return groups.error();
  return WithTypes(g, dw, [&](auto in, auto out) {
    using T = decltype(in);
    cpu::BackwardWeight(pool, *groups, dims->n, dims->k, FloatData<T>(g), FloatData<T>(x),
                        FloatData<decltype(out)>(dw));
  });
}

ffi::Error Nvfp4Matmul(ffi::ThreadPool pool, AnyBuffer a_codes, AnyBuffer a_block_scales,
                       AnyBuffer a_scale, AnyBuffer b_codes, AnyBuffer b_block_scales,
                       AnyBuffer b_scale, AnyResult y) {
  return Nvfp4Product(pool, a_codes, a_block_scales, a_scale, b_codes, b_block_scales, b_scale, y,
                      std::nullopt);
}

ffi::Error Nvfp4GroupedMatmul(ffi::ThreadPool pool, AnyBuffer a_codes, AnyBuffer a_block_scales,
                              AnyBuffer a_scale, AnyBuffer b_codes, AnyBuffer b_block_scales,
                              AnyBuffer b_scale, AnyBuffer group_sizes, AnyResult y,
                              AnyResult workspace) {
  return Nvfp4Product(pool, a_codes, a_block_scales, a_scale, b_codes, b_block_scales, b_scale, y,
                      Grouping{group_sizes, workspace});
}

ffi::Error Matmul(ffi::ThreadPool pool, AnyBuffer a, AnyBuffer b, AnyBuffer a_scale,
                  AnyBuffer b_scale, AnyResult y) {
  return Product(pool, a, b, a_scale, b_scale, y, std::nullopt);
}

ffi::Error GroupedMatmul(ffi::ThreadPool pool, AnyBuffer a, AnyBuffer b, AnyBuffer a_scale,
                         AnyBuffer b_scale, AnyBuffer group_sizes, AnyResult y,
                         AnyResult workspace) {
  return Product(pool, a, b, a_scale, b_scale, y, Grouping{group_sizes, workspace});
}

ffi::Error MatmulDx(ffi::ThreadPool pool, AnyBuffer g, AnyBuffer w, AnyResult dx) {
  return InputGradient(pool, g, w, dx, std::nullopt);
}

ffi::Error GroupedMatmulDx(ffi::ThreadPool pool, AnyBuffer g, AnyBuffer w, AnyBuffer group_sizes,
                           AnyResult dx, AnyResult workspace) {
  return InputGradient(pool, g, w, dx, Grouping{group_sizes, workspace});
}

ffi::Error MatmulDw(ffi::ThreadPool pool, AnyBuffer g, AnyBuffer x, AnyResult dw) {
  return WeightGradient(pool, g, x, dw, std::nullopt);
}

ffi::Error GroupedMatmulDw(ffi::ThreadPool pool, AnyBuffer g, AnyBuffer x, AnyBuffer group_sizes,
                           AnyResult dw, AnyResult workspace) {
  return WeightGradient(pool, g, x, dw, Grouping{group_sizes, workspace});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_nvfp4_matmul, Nvfp4Matmul,
                              BindNvfp4Matmul<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_nvfp4_grouped_matmul, Nvfp4GroupedMatmul,
                              BindNvfp4GroupedMatmul<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_matmul, Matmul, BindMatmul<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_grouped_matmul, GroupedMatmul,
                              BindGroupedMatmul<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_matmul_dx, MatmulDx, BindMatmulGrad<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_grouped_matmul_dx, GroupedMatmulDx,
                              BindGroupedMatmulGrad<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_matmul_dw, MatmulDw, BindMatmulGrad<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_grouped_matmul_dw, GroupedMatmulDw,
                              BindGroupedMatmulGrad<ffi::ThreadPool>());

}  // namespace jaxfp4
