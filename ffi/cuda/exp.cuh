// Exp and SwiGlu of ffi/numerics.h with fewer instructions, for arguments whose results are far
// from overflow and underflow. The bits are the same: of the steps of Exp, the clamps change
// nothing there, a product that is exact is fused with the subtraction that follows, and the two
// factors of 2^n are one addition to the exponent. Compile with -ftz=true, which the bits of small
// results assume.
#ifndef JAXFP4_CUDA_EXP_CUH_
#define JAXFP4_CUDA_EXP_CUH_

#include <cstdint>

#include "ffi/numerics.h"

namespace jaxfp4::cuda {

// The bits of Exp(x) as a signed number for |x| <= 104; where they are below those of 2^-126, the
// smallest normal number, Exp(x) is 0. Without a meaning if x is NaN.
__device__ __forceinline__ int32_t ExpBits(float x) {
  const float shifted = Add(Mul(x, 1.44269504088896341f), 12582912.0f);
  const float n = Sub(shifted, 12582912.0f);
  const float r = Sub(__fmaf_rn(-n, 0.693359375f, x), Mul(n, -2.12194440e-4f));
  float p = 1.9875691500e-4f;
  p = Add(Mul(p, r), 1.3981999507e-3f);
  p = Add(Mul(p, r), 8.3334519073e-3f);
  p = Add(Mul(p, r), 4.1665795894e-2f);
  p = Add(Mul(p, r), 1.6666665459e-1f);
  p = Add(Mul(p, r), 5.0000001201e-1f);
  p = Add(Add(Mul(p, Mul(r, r)), r), 1.0f);
  // The low bits of `shifted` are n; the others leave by the shift.
  return static_cast<int32_t>(Bits(p) + (Bits(shifted) << 23));
}

// The larger of x and `least`; NaN if x is.
__device__ __forceinline__ float ClampFromBelow(float x, float least) {
  float y;
  asm("max.NaN.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(least));
  return y;
}

// 1 / x, nearly always rounded correctly, for x between 2^-125 and 2^126.
__device__ __forceinline__ float Reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

// Div(a, b) with Reciprocal(b): the compiler's own steps without its check for operands at the ends
// of the range. The quotient, and a 2^-24 unless the quotient is exact, must be normal numbers. The
// remainder is taken negatively, which keeps the sign of a zero.
__device__ __forceinline__ float DivideBy(float a, float b, float reciprocal) {
  const float q = Mul(a, reciprocal);
  return __fmaf_rn(-reciprocal, __fmaf_rn(b, q, -a), q);
}

// SwiGlu(gate, up) for |gate| <= kLargestPlainGate, or NaN. A gate so small that the remainder
// would be lost has the divisor 2.
constexpr float kLargestPlainGate = 87.0f;

__device__ __forceinline__ float PlainSwiGlu(float gate, float up) {
  const float divisor = Add(1.0f, __int_as_float(ExpBits(-gate)));
  return Mul(DivideBy(gate, divisor, Reciprocal(divisor)), up);
}

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_EXP_CUH_
