// The product custom calls on the CPU: bind, check, call.
//
// Shapes: a [M, K], b [N, K] or [G, N, K], g [M, N], y [M, N]. Scales without elements are absent.
// The grouped calls' workspace is for GPU kernels; the CPU leaves it alone.
#include "ffi/cpu/groups.h"
#include "ffi/cpu/products.h"
#include "ffi/handlers.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;
using cpu::Groups;
using cpu::Nvfp4RowMajor;
using cpu::RowMajor;
using cpu::Scales;

using Any = ffi::AnyBuffer;
using F32 = ffi::Buffer<ffi::F32>;
using GroupSizes = ffi::Buffer<ffi::S32>;
using Result = ffi::Result<ffi::AnyBuffer>;
using Workspace = ffi::ResultBuffer<ffi::U8>;

Scales ScalesOf(F32 buffer) {
  const int64_t count = static_cast<int64_t>(buffer.element_count());
  return {count == 0 ? nullptr : buffer.typed_data(), count};
}

// One group that holds every row: a dense product.
Groups Dense(int64_t rows) { return {{0, rows}}; }

// Calls body(T*) with the float or uint16_t (bf16) type of `type`.
template <class Body>
ffi::Error WithType(ffi::DataType type, const char* name, const Body& body) {
  switch (type) {
    case ffi::F32:
      body(static_cast<float*>(nullptr));
      return ffi::Error::Success();
    case ffi::BF16:
      body(static_cast<uint16_t*>(nullptr));
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument(std::string(name) + " must be bf16 or f32");
  }
}

template <class T>
const T* Data(Any buffer, T*) {
  return static_cast<const T*>(buffer.untyped_data());
}

template <class T>
T* Data(Result buffer, T*) {
  return static_cast<T*>(buffer->untyped_data());
}

ffi::Error Nvfp4Product(ffi::ThreadPool& pool, const Groups& groups, Any a_codes,
                        Any a_block_scales, F32 a_scale, Any b_codes, Any b_block_scales,
                        F32 b_scale, Result y) {
  const int64_t rows = y->dimensions()[0], columns = y->dimensions()[1];
  const int64_t depth = a_codes.dimensions()[1] * 2;
  const Nvfp4RowMajor a{static_cast<const uint8_t*>(a_codes.untyped_data()),
                        static_cast<const uint8_t*>(a_block_scales.untyped_data()), depth};
  const auto b = [&](int64_t group) {
    const int64_t first = group * columns * depth;
    return Nvfp4RowMajor{
        static_cast<const uint8_t*>(b_codes.untyped_data()) + first / 2,
        static_cast<const uint8_t*>(b_block_scales.untyped_data()) + first / kBlock, depth};
  };
  return WithType(y->element_type(), "y", [&](auto* type) {
    cpu::Forward(pool, groups, rows, columns, depth, a, b, ScalesOf(a_scale), ScalesOf(b_scale),
                 Data(y, type));
  });
}

ffi::Error Product(ffi::ThreadPool& pool, const Groups& groups, Any a, Any b, F32 a_scale,
                   F32 b_scale, Result y) {
  if (a.element_type() != b.element_type()) {
    return ffi::Error::InvalidArgument("a and b must have the same type");
  }
  const int64_t rows = y->dimensions()[0], columns = y->dimensions()[1];
  const int64_t depth = a.dimensions()[1];
  ffi::Error inner = ffi::Error::Success();
  ffi::Error outer = WithType(a.element_type(), "a", [&](auto* in) {
    const auto matrix_b = [&](int64_t group) {
      return RowMajor<std::remove_pointer_t<decltype(in)>>{Data(b, in) + group * columns * depth,
                                                           depth};
    };
    const RowMajor<std::remove_pointer_t<decltype(in)>> matrix_a{Data(a, in), depth};
    inner = WithType(y->element_type(), "y", [&](auto* out) {
      cpu::Forward(pool, groups, rows, columns, depth, matrix_a, matrix_b, ScalesOf(a_scale),
                   ScalesOf(b_scale), Data(y, out));
    });
  });
  return outer.failure() ? outer : inner;
}

ffi::Error InputGradient(ffi::ThreadPool& pool, const Groups& groups, Any g, Any w, Result dx) {
  if (g.element_type() != w.element_type()) {
    return ffi::Error::InvalidArgument("g and w must have the same type");
  }
  const int64_t rows = g.dimensions()[0], depth = g.dimensions()[1];
  const int64_t columns = dx->dimensions()[1];
  ffi::Error inner = ffi::Error::Success();
  ffi::Error outer = WithType(g.element_type(), "g", [&](auto* in) {
    inner = WithType(dx->element_type(), "dx", [&](auto* out) {
      cpu::BackwardInput(pool, groups, rows, depth, columns, Data(g, in), Data(w, in),
                         Data(dx, out));
    });
  });
  return outer.failure() ? outer : inner;
}

ffi::Error WeightGradient(ffi::ThreadPool& pool, const Groups& groups, Any g, Any x, Result dw) {
  if (g.element_type() != x.element_type()) {
    return ffi::Error::InvalidArgument("g and x must have the same type");
  }
  const int64_t outputs = g.dimensions()[1], inputs = x.dimensions()[1];
  ffi::Error inner = ffi::Error::Success();
  ffi::Error outer = WithType(g.element_type(), "g", [&](auto* in) {
    inner = WithType(dw->element_type(), "dw", [&](auto* out) {
      cpu::BackwardWeight(pool, groups, outputs, inputs, Data(g, in), Data(x, in), Data(dw, out));
    });
  });
  return outer.failure() ? outer : inner;
}

// Reads the groups, then calls body(groups).
template <class Body>
ffi::Error WithGroups(GroupSizes group_sizes, int64_t rows, const Body& body) {
  ffi::ErrorOr<Groups> groups = cpu::ReadGroups(group_sizes, rows);
  if (groups.has_error()) return groups.error();
  if (groups->count() == 0) return ffi::Error::InvalidArgument("group_sizes has no groups");
  return body(*groups);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_nvfp4_matmul,
                              ([](ffi::ThreadPool pool, Any a_codes, Any a_block_scales,
                                  F32 a_scale, Any b_codes, Any b_block_scales, F32 b_scale,
                                  Result y) {
                                return Nvfp4Product(pool, Dense(y->dimensions()[0]), a_codes,
                                                    a_block_scales, a_scale, b_codes,
                                                    b_block_scales, b_scale, y);
                              }),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()    // a_codes u8 [M, K/2]
                                  .Arg<Any>()    // a_block_scales f8e4m3fn [M, K/16]
                                  .Arg<F32>()    // a_scale [M] or [1]
                                  .Arg<Any>()    // b_codes u8 [N, K/2]
                                  .Arg<Any>()    // b_block_scales f8e4m3fn [N, K/16]
                                  .Arg<F32>()    // b_scale [N] or [1]
                                  .Ret<Any>());  // y bf16|f32 [M, N]

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxfp4_cpu_nvfp4_grouped_matmul,
    ([](ffi::ThreadPool pool, Any a_codes, Any a_block_scales, F32 a_scale, Any b_codes,
        Any b_block_scales, F32 b_scale, GroupSizes group_sizes, Result y, Workspace) {
      return WithGroups(group_sizes, y->dimensions()[0], [&](const Groups& groups) {
        return Nvfp4Product(pool, groups, a_codes, a_block_scales, a_scale, b_codes, b_block_scales,
                            b_scale, y);
      });
    }),
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<Any>()                     // a_codes u8 [M, K/2]
        .Arg<Any>()                     // a_block_scales f8e4m3fn [M, K/16]
        .Arg<F32>()                     // a_scale [M] or [1]
        .Arg<Any>()                     // b_codes u8 [G, N, K/2]
        .Arg<Any>()                     // b_block_scales f8e4m3fn [G, N, K/16]
        .Arg<F32>()                     // b_scale [G] or [G * N]
        .Arg<GroupSizes>()              // group_sizes [G]
        .Ret<Any>()                     // y bf16|f32 [M, N]
        .Ret<ffi::Buffer<ffi::U8>>());  // workspace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxfp4_cpu_matmul, ([](ffi::ThreadPool pool, Any a, Any b, F32 a_scale, F32 b_scale, Result y) {
      return Product(pool, Dense(y->dimensions()[0]), a, b, a_scale, b_scale, y);
    }),
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<Any>()    // a bf16|f32 [M, K]
        .Arg<Any>()    // b like a [N, K]
        .Arg<F32>()    // a_scale [M], [1] or absent
        .Arg<F32>()    // b_scale [N], [1] or absent
        .Ret<Any>());  // y bf16|f32 [M, N]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_grouped_matmul,
                              ([](ffi::ThreadPool pool, Any a, Any b, F32 a_scale, F32 b_scale,
                                  GroupSizes group_sizes, Result y, Workspace) {
                                return WithGroups(
                                    group_sizes, y->dimensions()[0], [&](const Groups& groups) {
                                      return Product(pool, groups, a, b, a_scale, b_scale, y);
                                    });
                              }),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()                     // a bf16|f32 [M, K]
                                  .Arg<Any>()                     // b like a [G, N, K]
                                  .Arg<F32>()                     // a_scale [M], [1] or absent
                                  .Arg<F32>()                     // b_scale [G], [G * N] or absent
                                  .Arg<GroupSizes>()              // group_sizes [G]
                                  .Ret<Any>()                     // y bf16|f32 [M, N]
                                  .Ret<ffi::Buffer<ffi::U8>>());  // workspace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_matmul_dx,
                              ([](ffi::ThreadPool pool, Any g, Any w, Result dx) {
                                return InputGradient(pool, Dense(g.dimensions()[0]), g, w, dx);
                              }),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()    // g bf16|f32 [M, N]
                                  .Arg<Any>()    // w like g [N, K]
                                  .Ret<Any>());  // dx bf16|f32 [M, K]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_grouped_matmul_dx,
                              ([](ffi::ThreadPool pool, Any g, Any w, GroupSizes group_sizes,
                                  Result dx, Workspace) {
                                return WithGroups(group_sizes, g.dimensions()[0],
                                                  [&](const Groups& groups) {
                                                    return InputGradient(pool, groups, g, w, dx);
                                                  });
                              }),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()                     // g bf16|f32 [M, N]
                                  .Arg<Any>()                     // w like g [G, N, K]
                                  .Arg<GroupSizes>()              // group_sizes [G]
                                  .Ret<Any>()                     // dx bf16|f32 [M, K]
                                  .Ret<ffi::Buffer<ffi::U8>>());  // workspace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_matmul_dw,
                              ([](ffi::ThreadPool pool, Any g, Any x, Result dw) {
                                return WeightGradient(pool, Dense(g.dimensions()[0]), g, x, dw);
                              }),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()    // g bf16|f32 [M, N]
                                  .Arg<Any>()    // x like g [M, K]
                                  .Ret<Any>());  // dw bf16|f32 [N, K]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_grouped_matmul_dw,
                              ([](ffi::ThreadPool pool, Any g, Any x, GroupSizes group_sizes,
                                  Result dw, Workspace) {
                                return WithGroups(group_sizes, g.dimensions()[0],
                                                  [&](const Groups& groups) {
                                                    return WeightGradient(pool, groups, g, x, dw);
                                                  });
                              }),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()                     // g bf16|f32 [M, N]
                                  .Arg<Any>()                     // x like g [M, K]
                                  .Arg<GroupSizes>()              // group_sizes [G]
                                  .Ret<Any>()                     // dw bf16|f32 [G, N, K]
                                  .Ret<ffi::Buffer<ffi::U8>>());  // workspace

}  // namespace jaxfp4
