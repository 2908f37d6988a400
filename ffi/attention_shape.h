// The sizes of an attention call.
#ifndef JAXFP4_ATTENTION_SHAPE_H_
#define JAXFP4_ATTENTION_SHAPE_H_

#include <cstdint>

namespace jaxfp4 {

struct AttentionShape {
  int64_t batch, queries, slots, heads, kv_heads, head_dim;
  int64_t heads_per_kv() const { return heads / kv_heads; }
};

}  // namespace jaxfp4

#endif  // JAXFP4_ATTENTION_SHAPE_H_
