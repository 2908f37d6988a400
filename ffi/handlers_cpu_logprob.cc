// The log-probability custom calls on the CPU: bind, check, call.
#include "ffi/cpu/logprob.h"
#include "ffi/float_buffers.h"
#include "ffi/handlers.h"
#include "ffi/logprob_operands.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;

cpu::LogprobArgs MakeArgs(const LogprobDims& dims, LogprobRows rows) {
  return {dims.rows,
          dims.vocabulary,
          rows.tokens.typed_data<int32_t>(),
          rows.temperature.typed_data<float>(),
          rows.logprob->typed_data<float>(),
          rows.entropy->typed_data<float>(),
          rows.lse->typed_data<float>()};
}

ffi::Error LogitsLogprob(ffi::ThreadPool pool, AnyBuffer logits, AnyBuffer tokens,
                         AnyBuffer temperature, AnyResult logprob, AnyResult entropy,
                         AnyResult lse) {
  const LogprobRows rows = {tokens, temperature, logprob, entropy, lse};
  ffi::ErrorOr<LogprobDims> dims = CheckLogitsLogprob(logits, rows);
  if (dims.has_error()) return dims.error();
  cpu::LogitsLogprob(pool, logits.typed_data<float>(), MakeArgs(*dims, rows));
  return ffi::Error::Success();
}

ffi::Error LogprobChunk(ffi::ThreadPool pool, AnyBuffer logits, AnyBuffer tokens,
                        AnyBuffer temperature, AnyBuffer state, AnyResult new_state,
                        AnyResult logprob, AnyResult entropy, AnyResult lse) {
  const LogprobRows rows = {tokens, temperature, logprob, entropy, lse};
  ffi::ErrorOr<LogprobDims> dims = CheckLogprobChunk(logits, state, new_state, rows);
  if (dims.has_error()) return dims.error();
  cpu::LogprobChunk(pool, logits.typed_data<float>(), MakeArgs(*dims, rows),
                    static_cast<const LogprobState*>(state.untyped_data()),
                    static_cast<LogprobState*>(new_state->untyped_data()));
  return ffi::Error::Success();
}

ffi::Error TokenLogprob(ffi::ThreadPool pool, AnyBuffer hidden, AnyBuffer head, AnyBuffer tokens,
                        AnyBuffer temperature, AnyResult logprob, AnyResult entropy,
                        AnyResult lse) {
  const LogprobRows rows = {tokens, temperature, logprob, entropy, lse};
  ffi::ErrorOr<LogprobDims> dims = CheckTokenLogprob(hidden, head, rows);
  if (dims.has_error()) return dims.error();
  return ForFloatType(hidden.element_type(), [&](auto type) {
    using T = decltype(type);
    cpu::TokenLogprob(pool, dims->width, FloatData<T>(hidden), FloatData<T>(head),
                      MakeArgs(*dims, rows));
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_logits_logprob, LogitsLogprob,
                              BindLogitsLogprob<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_logprob_chunk, LogprobChunk,
                              BindLogprobChunk<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cpu_token_logprob, TokenLogprob,
                              BindTokenLogprob<ffi::ThreadPool>());

}  // namespace jaxfp4
