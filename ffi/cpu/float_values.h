// Reading and writing values that are stored as fp32 or as bf16 (uint16_t): computed on as fp32,
// rounded once where they are stored.
#ifndef JAXFP4_CPU_FLOAT_VALUES_H_
#define JAXFP4_CPU_FLOAT_VALUES_H_

#include <cstdint>

#include "ffi/numerics.h"

namespace jaxfp4::cpu {

inline float ToFloat(float x) { return x; }
inline float ToFloat(uint16_t bf16) { return Bf16ToFloat(bf16); }

inline void StoreFloat(float x, float* out) { *out = x; }
inline void StoreFloat(float x, uint16_t* bf16) { *bf16 = FloatToBf16(x); }

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_FLOAT_VALUES_H_
