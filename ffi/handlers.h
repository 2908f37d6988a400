// Every custom call's handler, as module.cc exports them. What each takes and returns is the table
// of custom calls in docs/design.md.
#ifndef JAXFP4_HANDLERS_H_
#define JAXFP4_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

// X(name): the handler's symbol is jaxfp4_cpu_<name> on the CPU and jaxfp4_cuda_<name> on a GPU,
// its target jaxfp4_<name>.
#define JAXFP4_FOR_EACH_HANDLER(X) \
  X(quantize)                      \
  X(quantize_tiled)                \
  X(quantize_expanded)             \
  X(nvfp4_matmul)                  \
  X(nvfp4_grouped_matmul)          \
  X(matmul)                        \
  X(grouped_matmul)                \
  X(matmul_dx)                     \
  X(grouped_matmul_dx)             \
  X(matmul_dw)                     \
  X(grouped_matmul_dw)             \
  X(rmsnorm)                       \
  X(swiglu)                        \
  X(qk_norm_rope)                  \
  X(router_topk)                   \
  X(combine_experts)               \
  X(combine_experts_grad)          \
  X(attention)                     \
  X(attention_grad)                \
  X(token_logprob)                 \
  X(logits_logprob)                \
  X(logprob_chunk)

// Those that have CUDA kernels. jaxfp4/logprob.py makes token_logprob of others there.
#define JAXFP4_FOR_EACH_CUDA_HANDLER(X) \
  X(quantize)                           \
  X(quantize_tiled)                     \
  X(quantize_expanded)                  \
  X(matmul)                             \
  X(grouped_matmul)                     \
  X(matmul_dx)                          \
  X(grouped_matmul_dx)                  \
  X(matmul_dw)                          \
  X(grouped_matmul_dw)                  \
  X(rmsnorm)                            \
  X(swiglu)                             \
  X(qk_norm_rope)                       \
  X(router_topk)                        \
  X(combine_experts)                    \
  X(combine_experts_grad)               \
  X(logits_logprob)                     \
  X(logprob_chunk)

#define JAXFP4_DECLARE_CPU_HANDLER(name) XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxfp4_cpu_##name);
JAXFP4_FOR_EACH_HANDLER(JAXFP4_DECLARE_CPU_HANDLER)
#undef JAXFP4_DECLARE_CPU_HANDLER

#ifdef JAXFP4_CUDA
#define JAXFP4_DECLARE_CUDA_HANDLER(name) XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxfp4_cuda_##name);
JAXFP4_FOR_EACH_CUDA_HANDLER(JAXFP4_DECLARE_CUDA_HANDLER)
#undef JAXFP4_DECLARE_CUDA_HANDLER
#endif

#endif  // JAXFP4_HANDLERS_H_
