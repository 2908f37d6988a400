// What token_logprob, logits_logprob and logprob_chunk take and return, and which of it is legal.
#ifndef JAXFP4_LOGPROB_OPERANDS_H_
#define JAXFP4_LOGPROB_OPERANDS_H_

#include <cstdint>

#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfp4 {

struct LogprobDims {
  int64_t rows, vocabulary;
  int64_t width = 0;  // of hidden; in token_logprob alone
};

// What all calls have for each of the M rows.
struct LogprobRows {
  AnyBuffer tokens;       // s32 [M]
  AnyBuffer temperature;  // f32 [M]
  AnyResult logprob;      // f32 [M]
  AnyResult entropy;      // f32 [M]
  AnyResult lse;          // f32 [M]
};

namespace internal {

inline void CheckLogprobRows(OperandCheck& check, LogprobRows rows, Dim* m) {
  check.Is("tokens", rows.tokens, {::xla::ffi::S32}, {m});
  check.Is("temperature", rows.temperature, {::xla::ffi::F32}, {m});
  check.Is("logprob", *rows.logprob, {::xla::ffi::F32}, {m});
  check.Is("entropy", *rows.entropy, {::xla::ffi::F32}, {m});
  check.Is("lse", *rows.lse, {::xla::ffi::F32}, {m});
}

}  // namespace internal

// logits f32 [M, V].
inline ::xla::ffi::ErrorOr<LogprobDims> CheckLogitsLogprob(AnyBuffer logits,
                                                           const LogprobRows& rows) {
  OperandCheck check("logits_logprob");
  Dim m{"M"}, v{"V"};
  check.Is("logits", logits, {::xla::ffi::F32}, {&m, &v});
  internal::CheckLogprobRows(check, rows, &m);
  return check.Finish(LogprobDims{m.size, v.size});
}

template <class Context>
auto BindLogitsLogprob() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()   // logits
      .template Arg<AnyBuffer>()   // tokens
      .template Arg<AnyBuffer>()   // temperature
      .template Ret<AnyBuffer>()   // logprob
      .template Ret<AnyBuffer>()   // entropy
      .template Ret<AnyBuffer>();  // lse
}

// logits f32 [M, C], a chunk of the vocabulary; state and new_state f32 [M, 4] (LogprobState).
inline ::xla::ffi::ErrorOr<LogprobDims> CheckLogprobChunk(AnyBuffer logits, AnyBuffer state,
                                                          AnyResult new_state,
                                                          const LogprobRows& rows) {
  OperandCheck check("logprob_chunk");
  Dim m{"M"}, c{"C"}, four{nullptr, 4};
  check.Is("logits", logits, {::xla::ffi::F32}, {&m, &c});
  check.Is("state", state, {::xla::ffi::F32}, {&m, &four});
  check.Is("new_state", *new_state, {::xla::ffi::F32}, {&m, &four});
  internal::CheckLogprobRows(check, rows, &m);
  return check.Finish(LogprobDims{m.size, c.size});
}

template <class Context>
auto BindLogprobChunk() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()   // logits
      .template Arg<AnyBuffer>()   // tokens, counted from the chunk's first
      .template Arg<AnyBuffer>()   // temperature
      .template Arg<AnyBuffer>()   // state
      .template Ret<AnyBuffer>()   // new_state
      .template Ret<AnyBuffer>()   // logprob
      .template Ret<AnyBuffer>()   // entropy
      .template Ret<AnyBuffer>();  // lse
}

// hidden bf16|f32 [M, W], head [V, W] of hidden's type.
inline ::xla::ffi::ErrorOr<LogprobDims> CheckTokenLogprob(AnyBuffer hidden, AnyBuffer head,
                                                          const LogprobRows& rows) {
  OperandCheck check("token_logprob");
  Dim m{"M"}, v{"V"}, w{"W"};
  check.Is("hidden", hidden, OperandCheck::kFloats, {&m, &w});
  check.Is("head", head, {hidden.element_type()}, {&v, &w});
  internal::CheckLogprobRows(check, rows, &m);
  return check.Finish(LogprobDims{m.size, v.size, w.size});
}

template <class Context>
auto BindTokenLogprob() {
  return ::xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<AnyBuffer>()   // hidden
      .template Arg<AnyBuffer>()   // head
      .template Arg<AnyBuffer>()   // tokens
      .template Arg<AnyBuffer>()   // temperature
      .template Ret<AnyBuffer>()   // logprob
      .template Ret<AnyBuffer>()   // entropy
      .template Ret<AnyBuffer>();  // lse
}

}  // namespace jaxfp4

#endif  // JAXFP4_LOGPROB_OPERANDS_H_
