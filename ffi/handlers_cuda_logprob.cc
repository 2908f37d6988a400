// The log-probability custom calls on a GPU: bind, check, launch.
#include <string>

#include "ffi/cuda/launch_status.h"
#include "ffi/cuda/logprob.h"
#include "ffi/handlers.h"
#include "ffi/logprob_operands.h"

namespace jaxfp4 {
namespace {

namespace ffi = ::xla::ffi;

using Stream = ffi::PlatformStream<cudaStream_t>;

ffi::Error Fold(const char* call, cudaStream_t stream, AnyBuffer logits, const LogprobDims& dims,
                const LogprobState* state, LogprobState* new_state, LogprobRows rows) {
  if (dims.vocabulary > cuda::kLargestVocabulary) {
    return ffi::Error::InvalidArgument(std::string(call) + ": a GPU takes up to " +
                                       std::to_string(cuda::kLargestVocabulary) +
                                       " logits a row, not " + std::to_string(dims.vocabulary));
  }
  cuda::LogprobArgs args;
  args.rows = dims.rows;
  args.vocabulary = dims.vocabulary;
  args.logits = logits.typed_data<float>();
  args.tokens = rows.tokens.typed_data<int32_t>();
  args.temperature = rows.temperature.typed_data<float>();
  args.state = state;
  args.new_state = new_state;
  args.logprob = rows.logprob->typed_data<float>();
  args.entropy = rows.entropy->typed_data<float>();
  args.lse = rows.lse->typed_data<float>();
  return cuda::LaunchStatus(call, cuda::FoldLogits(stream, args));
}

ffi::Error LogitsLogprob(cudaStream_t stream, AnyBuffer logits, AnyBuffer tokens,
                         AnyBuffer temperature, AnyResult logprob, AnyResult entropy,
                         AnyResult lse) {
  const LogprobRows rows = {tokens, temperature, logprob, entropy, lse};
  ffi::ErrorOr<LogprobDims> dims = CheckLogitsLogprob(logits, rows);
  if (dims.has_error()) return dims.error();
  return Fold("logits_logprob", stream, logits, *dims, nullptr, nullptr, rows);
}

ffi::Error LogprobChunk(cudaStream_t stream, AnyBuffer logits, AnyBuffer tokens,
                        AnyBuffer temperature, AnyBuffer state, AnyResult new_state,
                        AnyResult logprob, AnyResult entropy, AnyResult lse) {
  const LogprobRows rows = {tokens, temperature, logprob, entropy, lse};
  ffi::ErrorOr<LogprobDims> dims = CheckLogprobChunk(logits, state, new_state, rows);
  if (dims.has_error()) return dims.error();
  return Fold("logprob_chunk", stream, logits, *dims,
              static_cast<const LogprobState*>(state.untyped_data()),
              static_cast<LogprobState*>(new_state->untyped_data()), rows);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_logits_logprob, LogitsLogprob,
                              BindLogitsLogprob<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp4_cuda_logprob_chunk, LogprobChunk, BindLogprobChunk<Stream>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxfp4
