// The quantize custom calls on the CPU: bind, check, call.
//
// All three take the same operands and attributes and differ in what they write: packed codes with
// linear block scales, packed codes with tiled block scales (each group from its own 128-row tile),
// or the values that code times block scale gives, exact in bf16. An operand without elements is
// absent.
#include <cstring>
#include <vector>

#include "ffi/cpu/groups.h"
#include "ffi/cpu/quantize.h"
#include "ffi/handlers.h"
#include "ffi/scale_layout.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;
using cpu::Groups;
using cpu::QuantizeArgs;

using Codes = ffi::ResultBuffer<ffi::U8>;
using BlockScales = ffi::Result<ffi::AnyBuffer>;
using TiledBlockScales = ffi::ResultBuffer<ffi::U8>;
using Values = ffi::Result<ffi::AnyBuffer>;
using Scale = ffi::ResultBuffer<ffi::F32>;

// The operands and attributes that the three calls share.
struct Operands {
  ffi::AnyBuffer x;                    // bf16|f32 [M', K], or [M', 2K] under SwiGLU
  ffi::Buffer<ffi::F32> front_weight;  // [K] under RMSNorm
  ffi::Buffer<ffi::S32> rows;          // [M] gathers x's rows
  ffi::Buffer<ffi::F32> amax;          // [scales]
  ffi::Buffer<ffi::S32> group_sizes;   // [G]: later rows than their sum are not read
  int64_t front;
  float eps;
  int64_t rows_per_scale;
  bool pow2_scale;
  bool four_over_six;
};

template <class Buffer>
auto DataOrNull(const Buffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data();
}

// Everything but the outputs. `depth` is K.
ffi::ErrorOr<QuantizeArgs> MakeArgs(const Operands& in, int64_t depth, const Groups& groups) {
  if (in.x.dimensions().size() != 2 || depth == 0 || depth % kBlock != 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "x must be a matrix whose quantised width is a positive multiple of 16, got " +
        std::to_string(depth)));
  }
  QuantizeArgs args = {};
  args.x = in.x.untyped_data();
  args.x_rows = in.x.dimensions()[0];
  args.depth = depth;
  args.front_weight = DataOrNull(in.front_weight);
  args.gather = DataOrNull(in.rows);
  args.amax = DataOrNull(in.amax);
  args.rows = args.gather == nullptr ? args.x_rows : in.rows.dimensions()[0];
  args.used_rows = groups.count() == 0 ? args.rows : groups.used_rows();
  args.rows_per_scale = in.rows_per_scale;
  args.front = static_cast<cpu::Front>(in.front);
  args.eps = in.eps;
  args.pow2_scale = in.pow2_scale;
  args.four_over_six = in.four_over_six;
  return args;
}

int64_t QuantizedWidth(const Operands& in) {
  const int64_t width = in.x.dimensions().back();
  return in.front == static_cast<int64_t>(cpu::Front::kSwiGlu) ? width / 2 : width;
}

int64_t OutputRows(const Operands& in) {
  return in.rows.element_count() == 0 ? in.x.dimensions()[0] : in.rows.dimensions()[0];
}

// `finish(args, groups)` sets the outputs.
template <class Finish>
ffi::Error Run(ffi::ThreadPool& pool, const Operands& in, Scale scale, const Finish& finish) {
  ffi::ErrorOr<Groups> groups = cpu::ReadGroups(in.group_sizes, OutputRows(in));
  if (groups.has_error()) return groups.error();
  ffi::ErrorOr<QuantizeArgs> args = MakeArgs(in, QuantizedWidth(in), *groups);
  if (args.has_error()) return args.error();
  args->scale = scale->typed_data();
  finish(*args, *groups);
  switch (in.x.element_type()) {
    case ffi::BF16:
      cpu::Quantize<uint16_t>(pool, *args);
      return ffi::Error::Success();
    case ffi::F32:
      cpu::Quantize<float>(pool, *args);
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument("x must be bf16 or f32");
  }
}

ffi::Error Quantize(ffi::ThreadPool pool, Operands in, Codes codes, BlockScales block_scales,
                    Scale scale) {
  return Run(pool, in, scale, [&](QuantizeArgs& args, const Groups&) {
    args.codes = codes->typed_data();
    args.block_scales = reinterpret_cast<uint8_t*>(block_scales->untyped_data());
  });
}

ffi::Error QuantizeTiled(ffi::ThreadPool pool, Operands in, Codes codes,
                         TiledBlockScales block_scales, Scale scale) {
  std::vector<int64_t> slots;
  return Run(pool, in, scale, [&](QuantizeArgs& args, const Groups& groups) {
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
    args.codes = codes->typed_data();
    args.block_scales = block_scales->typed_data();
    args.row_slots = slots.data();
    memset(args.block_scales, 0, block_scales->element_count());
  });
}

ffi::Error QuantizeExpanded(ffi::ThreadPool pool, Operands in, Values values, Scale scale) {
  return Run(pool, in, scale, [&](QuantizeArgs& args, const Groups&) {
    args.values = reinterpret_cast<uint16_t*>(values->untyped_data());
  });
}

}  // namespace

#define JAXFP4_QUANTIZE_BINDING                        \
  ffi::Ffi::Bind()                                     \
      .Ctx<ffi::ThreadPool>()                          \
      .Arg<ffi::AnyBuffer>()        /* x */            \
      .Arg<ffi::Buffer<ffi::F32>>() /* front_weight */ \
      .Arg<ffi::Buffer<ffi::S32>>() /* rows */         \
      .Arg<ffi::Buffer<ffi::F32>>() /* amax */         \
      .Arg<ffi::Buffer<ffi::S32>>() /* group_sizes */  \
      .Attr<int64_t>("front")                          \
      .Attr<float>("eps")                              \
      .Attr<int64_t>("rows_per_scale")                 \
      .Attr<bool>("pow2_scale")                        \
      .Attr<bool>("four_over_six")

#define JAXFP4_QUANTIZE_PARAMETERS                                                               \
  ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> front_weight,                    \
      ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::F32> amax, ffi::Buffer<ffi::S32> group_sizes, \
      int64_t front, float eps, int64_t rows_per_scale, bool pow2_scale, bool four_over_six

#define JAXFP4_QUANTIZE_OPERANDS                                                      \
  Operands {                                                                          \
    x, front_weight, rows, amax, group_sizes, front, eps, rows_per_scale, pow2_scale, \
        four_over_six                                                                 \
  }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_quantize,
                              ([](JAXFP4_QUANTIZE_PARAMETERS, Codes codes, BlockScales block_scales,
                                  Scale scale) {
                                return Quantize(pool, JAXFP4_QUANTIZE_OPERANDS, codes, block_scales,
                                                scale);
                              }),
                              JAXFP4_QUANTIZE_BINDING
                                  .Ret<ffi::Buffer<ffi::U8>>()  // codes [M, K/2]
                                  .Ret<ffi::AnyBuffer>()        // block_scales f8e4m3fn [M, K/16]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // scale [M / rows_per_scale]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_quantize_tiled,
                              ([](JAXFP4_QUANTIZE_PARAMETERS, Codes codes,
                                  TiledBlockScales block_scales, Scale scale) {
                                return QuantizeTiled(pool, JAXFP4_QUANTIZE_OPERANDS, codes,
                                                     block_scales, scale);
                              }),
                              JAXFP4_QUANTIZE_BINDING
                                  .Ret<ffi::Buffer<ffi::U8>>()     // codes [M, K/2]
                                  .Ret<ffi::Buffer<ffi::U8>>()     // block_scales, tiled
                                  .Ret<ffi::Buffer<ffi::F32>>());  // scale [M / rows_per_scale]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_quantize_expanded,
                              ([](JAXFP4_QUANTIZE_PARAMETERS, Values values, Scale scale) {
                                return QuantizeExpanded(pool, JAXFP4_QUANTIZE_OPERANDS, values,
                                                        scale);
                              }),
                              JAXFP4_QUANTIZE_BINDING
                                  .Ret<ffi::AnyBuffer>()           // values bf16 [M, K]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // scale [M / rows_per_scale]

}  // namespace jaxfp4
