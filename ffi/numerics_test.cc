// Tests of numerics.h and scale_layout.h that need no framework: prints what failed, returns 1.
//
// The encoders are compared with a search over the table of all values, the table itself being
// computed from the definition of the format.
#include "ffi/numerics.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include "ffi/scale_layout.h"

namespace jaxfp4 {
namespace {

int failures = 0;

// Reports the first few failures of each kind, and counts all.
void Expect(bool ok, const char* what, double input, double got, double want) {
  if (ok) return;
  if (++failures <= 50) {
    std::printf("FAILED %s: input %.9g, got %.9g, want %.9g\n", what, input, got, want);
  }
}

void ExpectEqual(const char* what, double input, double got, double want) {
  const bool both_nan = std::isnan(got) && std::isnan(want);
  const bool equal = got == want && std::signbit(got) == std::signbit(want);
  Expect(equal || both_nan, what, input, got, want);
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The nonnegative values of a small float format in the order of their codes.
std::vector<double> Table(int exponent_bits, int mantissa_bits, int codes) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  std::vector<double> values;
  for (int code = 0; code < codes; ++code) {
    const int exponent = code >> mantissa_bits;
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    const double fraction = std::ldexp(mantissa, -mantissa_bits) + (exponent > 0 ? 1 : 0);
    values.push_back(std::ldexp(fraction, (exponent > 0 ? exponent : 1) - bias));
  }
  return values;
}

// The code of the value nearest to |v|, a tie going to the even code.
int NearestEven(const std::vector<double>& table, double v) {
  const double magnitude = std::fmin(std::fabs(v), table.back());
  int best = 0;
  for (int code = 1; code < static_cast<int>(table.size()); ++code) {
    const double error = std::fabs(magnitude - table[code]);
    const double best_error = std::fabs(magnitude - table[best]);
    if (error < best_error || (error == best_error && code % 2 == 0)) best = code;
  }
  return best;
}

// Every bf16 that is not NaN, and every value and midpoint of the table with its fp32 neighbours.
std::vector<float> Inputs(const std::vector<double>& table) {
  std::vector<float> inputs;
  for (uint32_t h = 0; h < 0x10000u; ++h) {
    if ((h & 0x7FFFu) < 0x7F80u) inputs.push_back(Bf16ToFloat(static_cast<uint16_t>(h)));
  }
  for (size_t i = 0; i + 1 < table.size(); ++i) {
    for (const double point : {table[i], (table[i] + table[i + 1]) / 2, table[i + 1]}) {
      const float v = static_cast<float>(point);
      for (const float x : {v, std::nextafter(v, 0.0f), std::nextafter(v, kInfinity)}) {
        inputs.push_back(x);
        inputs.push_back(-x);
      }
    }
  }
  return inputs;
}

void TestE2m1() {
  const std::vector<double> table = Table(2, 1, 8);
  for (uint32_t code = 0; code < 16; ++code) {
    const double value = table[code & 7u];
    ExpectEqual("E2m1ToFloat", code, E2m1ToFloat(code), code < 8 ? value : -value);
  }
  for (const float v : Inputs(table)) {
    const int want = NearestEven(table, v) + (std::signbit(v) ? 8 : 0);
    ExpectEqual("E2m1FromFloat", v, E2m1FromFloat(v), want);
  }
  ExpectEqual("E2m1FromFloat", kInfinity, E2m1FromFloat(kInfinity), 7);
  ExpectEqual("E2m1FromFloat", -kInfinity, E2m1FromFloat(-kInfinity), 15);
}

// All patterns of magnitudes that it is defined for.
void TestE2m1CodeBits() {
  for (uint32_t bits = 0; FromBits(bits) < 7.0f; ++bits) {
    const float v = FromBits(bits);
    const uint32_t code = E2m1CodeBits(v) - kE2m1CodeBits;
    if (code != E2m1FromFloat(v)) ExpectEqual("E2m1CodeBits", v, code, E2m1FromFloat(v));
  }
}

void TestE4m3() {
  const std::vector<double> table = Table(4, 3, 127);
  for (int code = 0; code < 256; ++code) {
    const int magnitude = code & 127;
    const double value = magnitude == 127 ? double{kNan} : table[magnitude];
    ExpectEqual("E4m3ToFloat", code, E4m3ToFloat(static_cast<uint8_t>(code)),
                code < 128 ? value : -value);
  }
  for (const float v : Inputs(table)) {
    if (std::signbit(v)) continue;
    ExpectEqual("E4m3FromFloat", v, E4m3FromFloat(v), NearestEven(table, v));
  }
  ExpectEqual("E4m3FromFloat", kInfinity, E4m3FromFloat(kInfinity), 0x7E);
}

void TestBf16() {
  for (uint32_t h = 0; h < 0x10000u; ++h) {
    const float x = Bf16ToFloat(static_cast<uint16_t>(h));
    if (!std::isnan(x)) ExpectEqual("bf16 round trip", x, FloatToBf16(x), h);
  }
  // Between neighbours of bf16: the nearer one, at the middle the even one.
  for (uint32_t h = 0; h < 0x7F80u; ++h) {
    const uint32_t low = h << 16;
    const uint32_t middle_up = h % 2 == 0 ? h : h + 1;
    ExpectEqual("FloatToBf16 tie", h, FloatToBf16(FromBits(low + 0x8000u)), middle_up);
    ExpectEqual("FloatToBf16 down", h, FloatToBf16(FromBits(low + 0x7FFFu)), h);
    ExpectEqual("FloatToBf16 up", h, FloatToBf16(FromBits(low + 0x8001u)), h + 1);
    ExpectEqual("FloatToBf16 sign", h, FloatToBf16(-FromBits(low + 1u)), h + 0x8000u);
  }
  for (const uint32_t nan : {0x7F800001u, 0x7FFFFFFFu, 0xFF800001u, 0xFFC00000u}) {
    const float back = Bf16ToFloat(FloatToBf16(FromBits(nan)));
    Expect(std::isnan(back) && std::signbit(back) == (nan >> 31 != 0), "FloatToBf16 NaN", nan, back,
           kNan);
  }
}

void TestSubnormals() {
  const float smallest = std::numeric_limits<float>::min();
  for (const float x : {FromBits(1u), FromBits(0x007FFFFFu), 0.0f}) {
    ExpectEqual("FlushSubnormal", x, FlushSubnormal(x), 0.0f);
    ExpectEqual("FlushSubnormal", -x, FlushSubnormal(-x), -0.0f);
    ExpectEqual("Magnitude", -x, Magnitude(-x), 0u);
  }
  ExpectEqual("FlushSubnormal", smallest, FlushSubnormal(-smallest), -smallest);
  ExpectEqual("Magnitude", smallest, Magnitude(-smallest), Bits(smallest));
  Expect(Magnitude(-kNan) > Magnitude(-kInfinity), "Magnitude order", kNan, Magnitude(-kNan),
         Magnitude(kInfinity));
}

void TestRowScale() {
  for (const float amax : {0.0f, -0.0f, FromBits(1u), FromBits(0x80000001u)}) {
    ExpectEqual("scale of zero", amax, MakeRowScale(amax, false).scale, 1.0);
    ExpectEqual("scale of zero", amax, MakeRowScale(amax, true).scale, 1.0);
  }
  for (const float amax : {kInfinity, -kInfinity, kNan, -kNan, -1.0f, -1e30f}) {
    for (const bool pow2 : {false, true}) {
      const RowScale bad = MakeRowScale(amax, pow2);
      Expect(!bad.finite && Bits(bad.scale) == kNanBits, "scale of a bad amax", amax, bad.scale,
             kNan);
    }
  }
  // Every exponent, with several mantissas.
  for (uint32_t bits = 0x00800000u; bits < kInfBits; bits += 0x00055557u) {
    const float amax = FromBits(bits);
    const RowScale exact = MakeRowScale(amax, false);
    const double uncapped = 2688.0 / amax;
    const double encode = uncapped < std::ldexp(1.0, 100) ? uncapped : std::ldexp(1.0, 100);
    ExpectEqual("encode", amax, exact.encode, static_cast<float>(encode));
    ExpectEqual("scale", amax, exact.scale, static_cast<float>(1.0 / exact.encode));

    const RowScale pow2 = MakeRowScale(amax, true);
    int exponent;
    Expect(std::frexp(pow2.scale, &exponent) == 0.5f && pow2.scale >= exact.scale &&
               pow2.scale / 2 < exact.scale,
           "pow2 scale", amax, pow2.scale, exact.scale);
    ExpectEqual("pow2 encode", amax, pow2.encode, 1.0 / pow2.scale);
  }
}

// The row 2688, 448, -224, .. | 3, .125, .375, -.1 worked out by hand: encode 1, sf 448 and 0.5.
void TestBlockByHand() {
  const RowScale scale = MakeRowScale(2688.0f, false);
  const uint8_t first = E4m3FromFloat(BlockScaleBase(2688.0f, scale.encode));
  const uint8_t second = E4m3FromFloat(BlockScaleBase(3.0f, scale.encode));
  ExpectEqual("sf", 2688, first, 0x7E);
  ExpectEqual("sf", 3, second, 0x30);
  ExpectEqual("block_enc", 3, BlockEncode(second, scale.scale), 2.0);
  const float x[] = {3.0f, 0.125f, 0.375f, 0.625f, 0.875f, -1.25f, -0.1f, -0.0f};
  const uint32_t codes[] = {7, 0, 2, 2, 4, 12, 8, 8};
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = E2m1FromFloat(Mul(x[i], BlockEncode(second, scale.scale)));
    ExpectEqual("code", x[i], code, codes[i]);
  }
}

void TestExp() {
  // All exponents and, with this stride, all mantissas' leading bits.
  for (uint64_t bits = 0; bits < 0x100000000u; bits += 1009u) {
    const float x = FromBits(static_cast<uint32_t>(bits));
    const double want = std::exp(static_cast<double>(x));
    const float got = Exp(x);
    if (std::isnan(x)) {
      Expect(std::isnan(got), "Exp of NaN", x, got, kNan);
    } else if (want < std::numeric_limits<float>::min()) {
      ExpectEqual("Exp below the smallest normal", x, got, 0.0);
    } else if (static_cast<float>(want) == kInfinity) {
      ExpectEqual("Exp above the largest finite", x, got, kInfinity);
    } else {
      const float nearest = static_cast<float>(want);
      const double ulp = static_cast<double>(std::nextafter(nearest, kInfinity)) - nearest;
      Expect(std::fabs(got - want) <= 2 * ulp, "Exp", x, got, want);
    }
  }
  ExpectEqual("Exp", 0, Exp(0.0f), 1.0);
  ExpectEqual("Exp", -0.0, Exp(-0.0f), 1.0);
  // It does not fall where it is cut off, nor around 1.
  for (const float edge : {-104.0f, -87.33654f, 0.0f, 88.72283f, 89.0f}) {
    float x = edge - 1e-3f * (std::fabs(edge) + 1e-3f);
    for (int i = 0; i < 50000 && x < 90.0f; ++i) {
      const float next = std::nextafter(x, kInfinity);
      Expect(Exp(next) >= Exp(x), "Exp is monotone", next, Exp(next), Exp(x));
      x = next;
    }
  }
}

void ExpectSwiGluNear(uint32_t gate_bits) {
  for (const float gate : {FromBits(gate_bits), -FromBits(gate_bits)}) {
    const float want = SwiGlu(gate, 1.5f), got = SwiGluNear(gate, 1.5f);
    if (Bits(got) != Bits(want)) ExpectEqual("SwiGluNear", gate, got, want);
  }
}

// Every bf16 and, with this stride, the leading bits of fp32's mantissas.
void TestSwiGluNear() {
  const uint32_t smallest = 0x00800000u, end = Bits(kNearGate);
  for (uint32_t bits = smallest; bits < end; bits += 0x10000u) ExpectSwiGluNear(bits);
  for (uint32_t bits = smallest; bits < end; bits += 263u) ExpectSwiGluNear(bits);
  ExpectSwiGluNear(0u);
}

void TestRows() {
  float partial[kRowPartials], other[kRowPartials];
  for (int i = 0; i < kRowPartials; ++i) {
    partial[i] = other[i] = std::ldexp(1.0f + 0.37f * static_cast<float>(i), (i * 7) % 23);
  }
  for (const int stride : {16, 8, 4, 2, 1}) {
    for (int j = 0; j < stride; ++j) other[j] = other[j] + other[j + stride];
  }
  ExpectEqual("RowTree", 0, RowTree(partial), other[0]);
  ExpectEqual("InverseRms", 12, InverseRms(12.0f, 48, 0.0f), 2.0);
  ExpectEqual("InverseRms", 0, InverseRms(0.0f, 48, 0.25f), 2.0);
  ExpectEqual("RmsNorm", 3, RmsNorm(3.0f, 2.0f, -0.5f), -3.0);
  ExpectEqual("SwiGlu", 0, SwiGlu(0.0f, 5.0f), 0.0);
  ExpectEqual("SwiGlu", 50, SwiGlu(50.0f, 2.0f), 100.0);
  ExpectEqual("SwiGlu", -100, SwiGlu(-100.0f, 2.0f), -0.0);
}

void TestScaleLayout() {
  for (const int64_t rows : {1, 127, 128, 129, 300}) {
    for (const int64_t blocks : {1, 3, 4, 5, 17}) {
      std::vector<int> used(TiledScaleBytes(rows, blocks), 0);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t b = 0; b < blocks; ++b) {
          const int64_t offset = TiledScaleOffset(r, b, blocks);
          const bool inside = offset >= 0 && offset < static_cast<int64_t>(used.size());
          Expect(inside && used[offset]++ == 0, "tiled offset is its own", r, offset, b);
        }
      }
    }
  }
  ExpectEqual("TiledScaleBytes", 130, TiledScaleBytes(130, 5), 2048);
  const int64_t places[][3] = {{0, 0, 0},   {1, 0, 16},     {32, 0, 4},    {0, 1, 1},
                               {0, 4, 512}, {128, 0, 1024}, {127, 3, 511}, {129, 4, 1552}};
  for (const auto& place : places) {
    ExpectEqual("TiledScaleOffset", place[0], TiledScaleOffset(place[0], place[1], 5), place[2]);
  }
}

}  // namespace
}  // namespace jaxfp4

int main() {
  jaxfp4::TestE2m1();
  jaxfp4::TestE2m1CodeBits();
  jaxfp4::TestE4m3();
  jaxfp4::TestBf16();
  jaxfp4::TestSubnormals();
  jaxfp4::TestRowScale();
  jaxfp4::TestBlockByHand();
  jaxfp4::TestExp();
  jaxfp4::TestSwiGluNear();
  jaxfp4::TestRows();
  jaxfp4::TestScaleLayout();
  if (jaxfp4::failures > 0) {
    std::printf("%d checks failed\n", jaxfp4::failures);
    return 1;
  }
  std::printf("all checks passed\n");
  return 0;
}
