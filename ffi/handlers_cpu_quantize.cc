// The quantize custom calls on the CPU: bind, check, call.
#include <cstring>
#include <vector>

#include "ffi/cpu/groups.h"
#include "ffi/cpu/quantize.h"
#include "ffi/float_buffers.h"
#include "ffi/handlers.h"
#include "ffi/quantize_operands.h"
#include "ffi/scale_layout.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;
using cpu::Groups;
using cpu::QuantizeArgs;

// Everything but the results that hold the quantised values.
QuantizeArgs MakeArgs(const QuantizeOperands& in, const QuantizeDims& dims, const Groups& groups,
                      AnyResult scale) {
  QuantizeArgs args = {};
  args.x = in.x.untyped_data();
  args.x_rows = dims.x_rows;
  args.depth = dims.depth;
  args.front_weight = DataOrNull<float>(in.front_weight);
  args.gather = DataOrNull<int32_t>(in.rows);
  args.amax = DataOrNull<float>(in.amax);
  args.rows = dims.rows;
  args.used_rows = groups.count() == 0 ? args.rows : groups.used_rows();
  args.rows_per_scale = in.rows_per_scale;
  args.front = in.front;
  args.eps = in.eps;
  args.pow2_scale = in.pow2_scale;
  args.four_over_six = in.four_over_six;
  args.scale = scale->typed_data<float>();
  return args;
}

// `set_results(args, groups)` sets the results that hold the quantised values.
template <class SetResults>
ffi::Error Run(ffi::ThreadPool& pool, const QuantizeOperands& in,
               const ffi::ErrorOr<QuantizeDims>& dims, AnyResult scale,
               const SetResults& set_results) {
  if (dims.has_error()) return dims.error();
  const ffi::ErrorOr<Groups> groups = cpu::ReadGroups(in.group_sizes, dims->rows);
  if (groups.has_error()) return groups.error();
  QuantizeArgs args = MakeArgs(in, *dims, *groups, scale);
  set_results(args, *groups);
  return ForFloatType(in.x.element_type(), [&](auto type) {
    cpu::Quantize<decltype(type)>(pool, args);
    return ffi::Error::Success();
  });
}

ffi::Error Quantize(ffi::ThreadPool pool, const QuantizeOperands& in, AnyResult codes,
                    AnyResult block_scales, AnyResult scale) {
  const auto dims = CheckQuantize(in, codes, block_scales, scale);
  return Run(pool, in, dims, scale, [&](QuantizeArgs& args, const Groups&) {
    args.codes = codes->typed_data<uint8_t>();
    args.block_scales = static_cast<uint8_t*>(block_scales->untyped_data());
  });
}

ffi::Error QuantizeTiled(ffi::ThreadPool pool, const QuantizeOperands& in, AnyResult codes,
                         AnyResult block_scales, AnyResult scale) {
  std::vector<int64_t> slots;
  const auto dims = CheckQuantizeTiled(in, codes, block_scales, scale);
  return Run(pool, in, dims, scale, [&](QuantizeArgs& args, const Groups& groups) {
    // Each group starts at its own tile, so that a group's scales are one contiguous piece.
    slots.resize(args.rows);
    int64_t first_slot = 0;
    const int64_t count = groups.count() == 0 ? 1 : groups.count();
    for (int64_t g = 0; g < count; ++g) {
      const int64_t start = groups.count() == 0 ? 0 : groups.starts[g];
      const int64_t size = groups.count() == 0 ? args.rows : groups.rows(g);
      for (int64_t r = 0; r < size; ++r) slots[start + r] = first_slot + r;
      first_slot += (size + kScaleTileRows - 1) / kScaleTileRows * kScaleTileRows;
    }
    args.codes = codes->typed_data<uint8_t>();
    args.block_scales = block_scales->typed_data<uint8_t>();
    args.row_slots = slots.data();
    memset(args.block_scales, 0, block_scales->element_count());
  });
}

ffi::Error QuantizeExpanded(ffi::ThreadPool pool, const QuantizeOperands& in, AnyResult values,
                            AnyResult scale) {
  const auto dims = CheckQuantizeExpanded(in, values, scale);
  return Run(pool, in, dims, scale, [&](QuantizeArgs& args, const Groups&) {
    args.values = static_cast<uint16_t*>(values->untyped_data());
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_quantize, QuantizeHandler(Quantize),
                              BindQuantize<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_quantize_tiled, QuantizeHandler(QuantizeTiled),
                              BindQuantize<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_quantize_expanded, QuantizeHandler(QuantizeExpanded),
                              BindQuantizeExpanded<ffi::ThreadPool>());

}  // namespace jaxfp4
