// The numerics of NVFP4, one text for host and device.
//
// e2m1 is the 4-bit float (0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives), e4m3 the 8-bit float
// without infinities (largest 448, 0x7F is NaN). For a row with the largest magnitude amax and,
// within it, a block of 16 values with the largest magnitude bmax:
//
//   encode    = min(2688 / amax, 2^100)               (1 if amax is 0)
//   sf        = e4m3(bmax * (encode * (1/6)))         saturating at 448
//   block_enc = 1 / (float(sf) * (1 / encode))
//   code      = e2m1(x * block_enc)                   saturating at 6
//   scale     = 1 / encode
//   value     = e2m1(code) * float(sf) * scale
//
// Every step is one IEEE fp32 operation, rounded to nearest even. Mul and Add are never
// contracted: on the host by -ffp-contract=off, on the device by the _rn intrinsics. Functions
// are free of branches where a compiler should vectorise the loop around them.
//
// Left out: loops over rows and blocks, which belong to the kernels.
#ifndef JAXFP4_NUMERICS_H_
#define JAXFP4_NUMERICS_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define JAXFP4_INLINE __host__ __device__ __forceinline__
#else
#define JAXFP4_INLINE inline __attribute__((always_inline))
#endif

namespace jaxfp4 {

constexpr int kBlock = 16;        // values that share one block scale
constexpr int kRowPartials = 32;  // strided partial sums of a row (see RowTree)
constexpr uint32_t kInfBits = 0x7F800000u;
constexpr uint32_t kNanBits = 0x7FC00000u;
constexpr uint8_t kNanBlockScale = 0x7F;

JAXFP4_INLINE uint32_t Bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof(u));
  return u;
}

JAXFP4_INLINE float FromBits(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof(x));
  return x;
}

// --- The five operations of the contract: IEEE, uncontracted. ---

#ifdef __CUDA_ARCH__
JAXFP4_INLINE float Mul(float a, float b) { return __fmul_rn(a, b); }
JAXFP4_INLINE float Add(float a, float b) { return __fadd_rn(a, b); }
JAXFP4_INLINE float Sub(float a, float b) { return __fsub_rn(a, b); }
JAXFP4_INLINE float Div(float a, float b) { return __fdiv_rn(a, b); }
JAXFP4_INLINE float Sqrt(float a) { return __fsqrt_rn(a); }
#else
JAXFP4_INLINE float Mul(float a, float b) { return a * b; }
JAXFP4_INLINE float Add(float a, float b) { return a + b; }
JAXFP4_INLINE float Sub(float a, float b) { return a - b; }
JAXFP4_INLINE float Div(float a, float b) { return a / b; }
JAXFP4_INLINE float Sqrt(float a) { return sqrtf(a); }
#endif

// a * b + c, rounded once.
#ifdef __CUDA_ARCH__
JAXFP4_INLINE float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
JAXFP4_INLINE float Fma(float a, float b, float c) { return fmaf(a, b, c); }
#endif

// The same quotients, 1 / b and a / b, where b, 1/b and the remainders of a / b are normal numbers
// and b is below 2^126: on a GPU what a general division does after it has ruled out every other
// case.

JAXFP4_INLINE float Reciprocal(float b) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  return Fma(r, Fma(-b, r, 1.0f), r);
#else
  return Div(1.0f, b);
#endif
}

JAXFP4_INLINE float DivNormal(float a, float b) {
#ifdef __CUDA_ARCH__
  const float r = Reciprocal(b);
  const float q = Mul(a, r);
  return Fma(-r, Fma(b, q, -a), q);  // with this sign of the remainder -0 / b stays -0
#else
  return Div(a, b);
#endif
}

// --- bf16 ---

JAXFP4_INLINE float Bf16ToFloat(uint16_t h) { return FromBits(static_cast<uint32_t>(h) << 16); }

// Round to nearest even; NaN stays a (quiet) NaN of its sign.
JAXFP4_INLINE uint16_t FloatToBf16(float x) {
  const uint32_t u = Bits(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;
  return static_cast<uint16_t>((u & 0x7FFFFFFFu) > kInfBits ? nan : rounded);
}

// --- Magnitudes. Compared as integers: that orders finite values, puts inf above them and NaN
// above inf, so one unsigned max both finds the amax and propagates NaN. ---

// |x| as bits; a subnormal counts as zero.
JAXFP4_INLINE uint32_t Magnitude(float x) {
  const uint32_t u = Bits(x) & 0x7FFFFFFFu;
  return u < 0x00800000u ? 0u : u;
}

// The value with a subnormal flushed to the zero of its sign.
JAXFP4_INLINE float FlushSubnormal(float x) {
  const uint32_t u = Bits(x);
  return FromBits((u & 0x7FFFFFFFu) < 0x00800000u ? u & 0x80000000u : u);
}

// --- e4m3 (nonnegative) ---

// Nearest even, saturating at 448. v must be nonnegative and not NaN.
JAXFP4_INLINE uint8_t E4m3FromFloat(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(v));
  return static_cast<uint8_t>(pair);
#else
  v = v < 448.0f ? v : 448.0f;
  const uint32_t u = Bits(v);
  // Normal: drop 20 of 23 mantissa bits, move the exponent bias from 127 to 7.
  const uint32_t normal = ((u + 0x7FFFFu + ((u >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 the spacing is 2^-9: adding 2^14, whose last place is 2^-9, rounds to it.
  const uint32_t subnormal = Bits(Add(v, 16384.0f)) - Bits(16384.0f);
  return static_cast<uint8_t>(v < 0.015625f ? subnormal : normal);
#endif
}

// Exact. 0x7F and 0xFF are NaN.
JAXFP4_INLINE float E4m3ToFloat(uint8_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  float value;
  asm("{.reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 pair, %1;"
      " mov.b32 {low, high}, pair; cvt.f32.f16 %0, low;}"
      : "=f"(value)
      : "h"(static_cast<uint16_t>(b)));
  return value;
#else
  const uint32_t sign = static_cast<uint32_t>(b & 0x80u) << 24;
  const uint32_t magnitude = b & 0x7Fu;
  const float normal = FromBits((magnitude << 20) + (120u << 23));
  const float subnormal = static_cast<float>(magnitude) * 0.001953125f;  // 2^-9, exact
  const float value = magnitude == 0x7Fu ? FromBits(kNanBits) : magnitude < 8u ? subnormal : normal;
  return FromBits(Bits(value) | sign);
#endif
}

// --- e2m1 ---

// Nearest even, saturating at 6, the sign kept (so -0 gives code 8). v must not be NaN.
JAXFP4_INLINE uint32_t E2m1FromFloat(float v) {
  const float magnitude = FromBits(Bits(v) & 0x7FFFFFFFu);
  const float a = magnitude < 6.0f ? magnitude : 6.0f;
  const uint32_t u = Bits(a);
  // As in e4m3: drop 22 of 23 mantissa bits and move the bias from 127 to 1; below 1 the spacing
  // is 0.5, the last place of 2^22.
  const uint32_t normal = ((u + 0x1FFFFFu + ((u >> 22) & 1u)) >> 22) - (126u << 1);
  const uint32_t subnormal = Bits(Add(a, 4194304.0f)) - Bits(4194304.0f);
  return (a < 1.0f ? subnormal : normal) | (Bits(v) >> 31 << 3);
}

// The code of a magnitude v below 7, as the last bits of a float: kE2m1CodeBits + code. As a
// function of v, codes before rounding are the lowest of three lines, 2v, v + 2 and v/2 + 4. Adding
// 2^23 rounds a line to nearest even, and rounding keeps the order. On a GPU this is four
// instructions.
constexpr uint32_t kE2m1CodeBits = 0x4B000000u;  // 2^23

JAXFP4_INLINE uint32_t E2m1CodeBits(float v) {
#ifdef __CUDA_ARCH__
  return __vimin3_u32(Bits(Fma(v, 2.0f, 8388608.0f)), Bits(Add(v, 8388610.0f)),
                      Bits(Fma(v, 0.5f, 8388612.0f)));
#else
  const uint32_t first = Bits(2.0f * v + 8388608.0f);  // doubling and halving are exact
  const uint32_t second = Bits(v + 8388610.0f);
  const uint32_t third = Bits(0.5f * v + 8388612.0f);
  const uint32_t lower = first < second ? first : second;
  return lower < third ? lower : third;
#endif
}

// Exact.
JAXFP4_INLINE float E2m1ToFloat(uint32_t code) {
  const uint32_t magnitude = code & 7u;
  // 0 and 0.5 are e2m1's subnormals; above them the fields move straight into fp32's.
  const float value = magnitude < 2u ? 0.5f * static_cast<float>(magnitude)
                                     : FromBits((magnitude << 22) + (126u << 23));
  return FromBits(Bits(value) | ((code & 8u) << 28));
}

// --- Scales ---

// The fp32 scale of a row or matrix, and its reciprocal that encodes.
struct RowScale {
  float encode;
  float scale;
  bool finite;  // false: scale is NaN, every block scale 0x7F, every code 0
};

// amax as it was found (Magnitude) or given by the caller; a negative one counts as NaN.
JAXFP4_INLINE RowScale MakeRowScale(float amax, bool pow2_scale) {
  const uint32_t magnitude = Magnitude(amax);
  const bool negative = (Bits(amax) >> 31) != 0u && magnitude != 0u;
  if (magnitude >= kInfBits || negative) return {1.0f, FromBits(kNanBits), false};
  float encode = 1.0f;
  if (magnitude != 0u) {
    // 2688 / amax, at most 2^100 so that both scales stay normal numbers; in powers of two that
    // keep every step normal.
    constexpr float kSmallest = 2688.0f / 1.2676506002282294e30f;
    const float capped = FromBits(magnitude) > kSmallest ? FromBits(magnitude) : kSmallest;
    constexpr float kDown24 = 1.0f / 16777216.0f;
    encode = Mul(DivNormal(2688.0f / 65536.0f, Mul(capped, kDown24)), 1.0f / 256.0f);
  }
  float scale = Reciprocal(encode);
  if (pow2_scale) {
    const uint32_t up = (Bits(scale) & 0x7FFFFFu) != 0u ? 0x800000u : 0u;
    scale = FromBits((Bits(scale) & kInfBits) + up);
    encode = Reciprocal(scale);
  }
  return {encode, scale, true};
}

// The unrounded block scale of a block whose largest magnitude is bmax.
JAXFP4_INLINE float BlockScaleBase(float bmax, float encode) {
  return Mul(bmax, Mul(encode, 1.0f / 6.0f));
}

// What the block's values are multiplied by. Not used where sf is 0. Between 2^-126 and 2^109,
// because sf is in [2^-9, 448] and scale in [2^-100, 2^117].
JAXFP4_INLINE float BlockEncode(uint8_t sf, float scale) {
  return Reciprocal(Mul(E4m3ToFloat(sf), scale));
}

// --- exp, the same polynomial on every platform: at most 2 ulp; results below 2^-126 are 0. ---

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2High = 0.693359375f;  // 9 bits: n * kLn2High is exact
constexpr float kLn2Low = -2.12194440e-4f;
constexpr float kExpRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// exp(r) for |r| <= ln(2) / 2.
JAXFP4_INLINE float ExpPolynomial(float r) {
  float p = 1.9875691500e-4f;
  p = Add(Mul(p, r), 1.3981999507e-3f);
  p = Add(Mul(p, r), 8.3334519073e-3f);
  p = Add(Mul(p, r), 4.1665795894e-2f);
  p = Add(Mul(p, r), 1.6666665459e-1f);
  p = Add(Mul(p, r), 5.0000001201e-1f);
  return Add(Add(Mul(p, Mul(r, r)), r), 1.0f);
}

JAXFP4_INLINE float Exp(float x) {
  const float high = x > 89.0f ? 89.0f : x;
  const float clamped = high < -104.0f ? -104.0f : high;
  const float shifted = Add(Mul(clamped, kLog2e), kExpRound);
  const float n = Sub(shifted, kExpRound);
  const float r = Sub(Sub(clamped, Mul(n, kLn2High)), Mul(n, kLn2Low));
  const float p = ExpPolynomial(r);
  // 2^n in two factors, because n reaches 128.
  const int32_t exponent = static_cast<int32_t>(Bits(shifted) - Bits(kExpRound));
  const int32_t half = exponent >> 1;
  const float first = FromBits(static_cast<uint32_t>(half + 127) << 23);
  const float second = FromBits(static_cast<uint32_t>(exponent - half + 127) << 23);
  const float result = Mul(Mul(p, first), second);
  return result < 1.17549435e-38f ? 0.0f : result;
}

JAXFP4_INLINE float SwiGlu(float gate, float up) {
  return Mul(Div(gate, Add(1.0f, Exp(-gate))), up);
}

// SwiGlu where |gate| is below this bound, bit for bit, in half the instructions on a GPU: nothing
// needs clamping, exact products go into fused multiply-adds, and the divisor is at least 1, and 2
// for a gate so small that a remainder would not be a normal number.
constexpr float kNearGate = 16.0f;

JAXFP4_INLINE float SwiGluNear(float gate, float up) {
  const float shifted = Add(Mul(-gate, kLog2e), kExpRound);
  const float n = Sub(shifted, kExpRound);
  const float r = Sub(Fma(-n, kLn2High, -gate), Mul(n, kLn2Low));
  const float power = FromBits((Bits(shifted) << 23) + Bits(1.0f));  // 2^n
  return Mul(DivNormal(gate, Fma(ExpPolynomial(r), power, 1.0f)), up);
}

// --- The sum along a row: 32 strided partial sums, then a fixed binary tree. ---

JAXFP4_INLINE float RowTree(float* partial) {
  for (int stride = kRowPartials / 2; stride > 0; stride /= 2) {
    for (int j = 0; j < stride; ++j) partial[j] = Add(partial[j], partial[j + stride]);
  }
  return partial[0];
}

// What RMSNorm multiplies a row by: 1 / sqrt(sum(x^2) / width + eps).
JAXFP4_INLINE float InverseRms(float sum_of_squares, int64_t width, float eps) {
  return Div(1.0f, Sqrt(Add(Div(sum_of_squares, static_cast<float>(width)), eps)));
}

// x * inverse_rms * weight, in that order.
JAXFP4_INLINE float RmsNorm(float x, float inverse_rms, float weight) {
  return Mul(Mul(x, inverse_rms), weight);
}

}  // namespace jaxfp4

#endif  // JAXFP4_NUMERICS_H_
