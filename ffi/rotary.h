// Sine and cosine of a rotary embedding's angles, one text for host and device.
//
// The quadrant and the remainder are found in double, so that an angle of any position is exact to
// fp32; the polynomials on [-pi/4, pi/4] are fp32 and uncontracted. At most 2 ulp of the larger of
// the two results.
#ifndef JAXFP4_ROTARY_H_
#define JAXFP4_ROTARY_H_

#include "ffi/numerics.h"

namespace jaxfp4 {

struct ReducedAngle {
  float remainder;  // in [-pi/4, pi/4]
  int32_t quadrant;
};

JAXFP4_INLINE ReducedAngle ReduceAngle(float angle) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  constexpr double kHalfPi = 1.57079632679489661923;
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double shifted = static_cast<double>(angle) * kTwoOverPi + kRound;
  const double turns = shifted - kRound;
  int64_t bits;
  memcpy(&bits, &shifted, sizeof(bits));
  return {static_cast<float>(static_cast<double>(angle) - turns * kHalfPi),
          static_cast<int32_t>(bits & 3)};
}

struct SineCosine {
  float sine, cosine;
};

JAXFP4_INLINE SineCosine Rotate(ReducedAngle angle) {
  const float r = angle.remainder;
  const float z = Mul(r, r);
  float s = Add(Mul(-1.9515295891e-4f, z), 8.3321608736e-3f);
  s = Add(Mul(s, z), -1.6666654611e-1f);
  s = Add(Mul(Mul(s, z), r), r);
  float c = Add(Mul(2.443315711809948e-5f, z), -1.388731625493765e-3f);
  c = Add(Mul(c, z), 4.166664568298827e-2f);
  c = Add(Sub(Mul(Mul(c, z), z), Mul(0.5f, z)), 1.0f);
  const bool odd = (angle.quadrant & 1) != 0;
  const uint32_t sine_sign = static_cast<uint32_t>(angle.quadrant & 2) << 30;
  const uint32_t cosine_sign = static_cast<uint32_t>((angle.quadrant + 1) & 2) << 30;
  return {FromBits(Bits(odd ? c : s) ^ sine_sign), FromBits(Bits(odd ? s : c) ^ cosine_sign)};
}

}  // namespace jaxfp4

#endif  // JAXFP4_ROTARY_H_
