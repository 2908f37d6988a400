// The log-probability custom calls on the CPU: bind, check, call.
#include "ffi/cpu/logprob.h"
#include "ffi/float_buffers.h"
#include "ffi/handlers.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;

using Float = ffi::AnyBuffer;  // bf16 or f32
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;

ffi::ErrorOr<cpu::LogprobArgs> MakeArgs(int64_t rows, int64_t vocabulary, const S32& tokens,
                                        const F32& temperature, F32Result& logprob,
                                        F32Result& entropy, F32Result& lse) {
  for (const size_t count :
       {tokens.element_count(), temperature.element_count(), logprob->element_count(),
        entropy->element_count(), lse->element_count()}) {
    if (count != size_t(rows)) {
      return ffi::Unexpected(ffi::Error::InvalidArgument(
          "tokens, temperature and the results must have one element a row"));
    }
  }
  return cpu::LogprobArgs{rows,
                          vocabulary,
                          tokens.typed_data(),
                          temperature.typed_data(),
                          logprob->typed_data(),
                          entropy->typed_data(),
                          lse->typed_data()};
}

ffi::Error LogitsLogprob(ffi::ThreadPool pool, F32 logits, S32 tokens, F32 temperature,
                         F32Result logprob, F32Result entropy, F32Result lse) {
  const auto dims = logits.dimensions();
  if (dims.size() != 2) {
    return ffi::Error::InvalidArgument("logits_logprob: logits must be [rows, vocabulary]");
  }
  ffi::ErrorOr<cpu::LogprobArgs> args =
      MakeArgs(dims[0], dims[1], tokens, temperature, logprob, entropy, lse);
  if (args.has_error()) return args.error();
  cpu::LogitsLogprob(pool, logits.typed_data(), *args);
  return ffi::Error::Success();
}

ffi::Error TokenLogprob(ffi::ThreadPool pool, Float hidden, Float head, S32 tokens, F32 temperature,
                        F32Result logprob, F32Result entropy, F32Result lse) {
  const auto dims = hidden.dimensions(), head_dims = head.dimensions();
  if (dims.size() != 2 || head_dims.size() != 2 || dims[1] != head_dims[1] ||
      hidden.element_type() != head.element_type()) {
    return ffi::Error::InvalidArgument(
        "token_logprob: hidden must be [rows, width] and head [vocabulary, width], of one type");
  }
  ffi::ErrorOr<cpu::LogprobArgs> args =
      MakeArgs(dims[0], head_dims[0], tokens, temperature, logprob, entropy, lse);
  if (args.has_error()) return args.error();
  return ForFloatType(hidden.element_type(), "hidden", [&](auto type) {
    using T = decltype(type);
    cpu::TokenLogprob(pool, dims[1], FloatData<T>(hidden), FloatData<T>(head), *args);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_logits_logprob, LogitsLogprob,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()    // logits [rows, vocabulary]
                                  .Arg<S32>()    // tokens [rows]
                                  .Arg<F32>()    // temperature [rows]
                                  .Ret<F32>()    // logprob [rows]
                                  .Ret<F32>()    // entropy [rows]
                                  .Ret<F32>());  // lse [rows]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_token_logprob, TokenLogprob,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Float>()  // hidden [rows, width]
                                  .Arg<Float>()  // head [vocabulary, width], of hidden's type
                                  .Arg<S32>()    // tokens [rows]
                                  .Arg<F32>()    // temperature [rows]
                                  .Ret<F32>()    // logprob [rows]
                                  .Ret<F32>()    // entropy [rows]
                                  .Ret<F32>());  // lse [rows]

}  // namespace jaxfp4
