// Writing an fp32 value as fp32 or, rounded once, as bf16: the inverse of ToFloat in gemm.h.
#ifndef JAXFP4_CPU_STORE_FLOAT_H_
#define JAXFP4_CPU_STORE_FLOAT_H_

#include <cstdint>

#include "ffi/numerics.h"

namespace jaxfp4::cpu {

inline void StoreFloat(float x, float* out) { *out = x; }
inline void StoreFloat(float x, uint16_t* bf16) { *bf16 = FloatToBf16(x); }

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_STORE_FLOAT_H_
