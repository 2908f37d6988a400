// One block of 16 values in the registers of one thread: its largest magnitude and its encoding.
//
// The arithmetic is that of ffi/numerics.h; what is here packs it so that a value costs few
// instructions, since a quantizer that keeps up with memory has about twenty for each.
#ifndef JAXFP4_CUDA_NVFP4_BLOCK_CUH_
#define JAXFP4_CUDA_NVFP4_BLOCK_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "ffi/numerics.h"

namespace jaxfp4::cuda {

// Values as they are in memory, 16-byte aligned there.
template <class T>
struct Block;

template <>
struct Block<uint16_t> {
  uint4 half[2];

  __device__ __forceinline__ uint32_t Word(int i) const {  // values 2i and 2i + 1
    const uint4& h = half[i / 4];
    return i % 4 == 0 ? h.x : i % 4 == 1 ? h.y : i % 4 == 2 ? h.z : h.w;
  }
  __device__ __forceinline__ float Value(int i) const {
    const uint32_t word = Word(i / 2);
    return FromBits(i % 2 == 0 ? word << 16 : word & 0xFFFF0000u);
  }
};

template <>
struct Block<float> {
  float4 quarter[4];

  __device__ __forceinline__ float Value(int i) const {
    const float4& q = quarter[i / 4];
    return i % 4 == 0 ? q.x : i % 4 == 1 ? q.y : i % 4 == 2 ? q.z : q.w;
  }
};

__device__ __forceinline__ Block<uint16_t> LoadBlock(const uint16_t* p) {
  const uint4* from = reinterpret_cast<const uint4*>(p);
  return {__ldg(from), __ldg(from + 1)};
}

__device__ __forceinline__ Block<float> LoadBlock(const float* p) {
  const float4* from = reinterpret_cast<const float4*>(p);
  return {__ldg(from), __ldg(from + 1), __ldg(from + 2), __ldg(from + 3)};
}

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

__device__ __forceinline__ void StoreRounded(float v, uint16_t* p) {
  *p = __bfloat16_as_ushort(__float2bfloat16_rn(v));
}

__device__ __forceinline__ void StoreRounded(float v, float* p) { *p = v; }

// The values rounded to T.
__device__ __forceinline__ void RoundBlock(const float (&v)[kBlock], Block<uint16_t>* block) {
  for (int h = 0; h < 2; ++h) {
    const float* u = v + 8 * h;
    block->half[h] = make_uint4(PackBf16(u[0], u[1]), PackBf16(u[2], u[3]), PackBf16(u[4], u[5]),
                                PackBf16(u[6], u[7]));
  }
}

__device__ __forceinline__ void RoundBlock(const float (&v)[kBlock], Block<float>* block) {
  for (int q = 0; q < 4; ++q) {
    block->quarter[q] = make_float4(v[4 * q], v[4 * q + 1], v[4 * q + 2], v[4 * q + 3]);
  }
}

// --- The largest magnitude, as in Magnitude(): bits, a subnormal as zero, NaN above infinity. ---

__device__ __forceinline__ uint32_t LargestMagnitude(const Block<uint16_t>& block) {
  constexpr uint32_t kMagnitudes = 0x7FFF7FFFu;
  uint32_t pair = block.Word(0) & kMagnitudes;
#pragma unroll
  for (int i = 1; i < 7; i += 2) {
    pair = __vimax3_u16x2(pair, block.Word(i) & kMagnitudes, block.Word(i + 1) & kMagnitudes);
  }
  pair = __vmaxu2(pair, block.Word(7) & kMagnitudes);
  const uint32_t largest = max(pair << 16, pair & 0xFFFF0000u);
  return largest < 0x00800000u ? 0u : largest;
}

__device__ __forceinline__ uint32_t LargestMagnitude(const Block<float>& block) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kBlock; i += 2) {
    largest = __vimax3_u32(largest, Bits(block.Value(i)) & 0x7FFFFFFFu,
                           Bits(block.Value(i + 1)) & 0x7FFFFFFFu);
  }
  return largest < 0x00800000u ? 0u : largest;
}

// --- Encoding ---

// A block's scale as it is stored and as it is used.
struct BlockScale {
  uint8_t sf;    // e4m3
  float encode;  // what values are multiplied by; 0 where every code is 0
};

// e2m1 of a magnitude as a float, saturating at 6. The spacing is half the value's power of two, or
// 0.5 below 2; adding 2^22 powers of two rounds to it.
__device__ __forceinline__ float RoundToE2m1(float v) {
  const float clamped = fminf(v, 6.0f);
  const float power = fmaxf(FromBits(Bits(clamped) & kInfBits), 1.0f);
  return __fmaf_rn(power, -4194304.0f, __fmaf_rn(power, 4194304.0f, clamped));
}

// Four over six: the sum over the block of the squared error under block scale sf.
template <class T>
__device__ __forceinline__ float SquaredError(const Block<T>& block, uint8_t sf,
                                              const RowScale& row) {
  const float sf_value = E4m3ToFloat(sf);
  const float encode = sf == 0 ? 0.0f : BlockEncode(sf, row.scale);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float x = fabsf(block.Value(i));  // an error's square does not depend on the sign
    const float error = Sub(Mul(x, row.encode), Mul(RoundToE2m1(Mul(x, encode)), sf_value));
    sum = Add(sum, Mul(error, error));
  }
  return sum;
}

// `largest` is the block's LargestMagnitude.
template <bool kFourOverSix, class T>
__device__ __forceinline__ BlockScale ScaleOfBlock(const Block<T>& block, uint32_t largest,
                                                   const RowScale& row) {
  if (!row.finite || largest >= kInfBits) return {kNanBlockScale, 0.0f};
  const float base = BlockScaleBase(FromBits(largest), row.encode);
  uint8_t sf = E4m3FromFloat(base);
  if constexpr (kFourOverSix) {
    const uint8_t sf4 = E4m3FromFloat(Mul(1.5f, base));
    if (SquaredError(block, sf4, row) < SquaredError(block, sf, row)) sf = sf4;
  }
  return {sf, sf == 0 ? 0.0f : BlockEncode(sf, row.scale)};
}

// Signs of eight values in bit 3 of eight nibbles.
__device__ __forceinline__ uint32_t Signs8(const Block<uint16_t>& block, int first) {
  const int w = first / 2;
  const uint32_t low = __byte_perm(block.Word(w), block.Word(w + 1), 0x7351);
  const uint32_t high = __byte_perm(block.Word(w + 2), block.Word(w + 3), 0x7351);
  const uint32_t even = __byte_perm(low, high, 0x5410);
  const uint32_t odd = __byte_perm(low, high, 0x7632);
  return ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
}

__device__ __forceinline__ uint32_t Signs8(const Block<float>& block, int first) {
  uint32_t parity[2];
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const int i = first + p;
    const uint32_t low = __byte_perm(Bits(block.Value(i)), Bits(block.Value(i + 2)), 0x0073);
    const uint32_t high = __byte_perm(Bits(block.Value(i + 4)), Bits(block.Value(i + 6)), 0x7300);
    parity[p] = __byte_perm(low, high, 0x7610);
  }
  return ((parity[0] >> 4) & 0x08080808u) | (parity[1] & 0x80808080u);
}

// Magnitudes times the block's encode, at most 6.
template <class T>
__device__ __forceinline__ void ScaledMagnitudes(const Block<T>& block, uint32_t largest,
                                                 float encode, float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = Mul(fabsf(block.Value(i)), encode);
  // Rare, and known from the largest alone: below 7 nothing rounds past 6.
  if (Mul(FromBits(largest), encode) >= 7.0f) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = fminf(v[i], 6.0f);
  }
}

// 16 codes, two a byte.
template <class T>
__device__ __forceinline__ uint2 EncodeBlock(const Block<T>& block, uint32_t largest,
                                             const BlockScale& scale) {
  float v[kBlock];
  ScaledMagnitudes(block, largest, scale.encode, v);
  uint32_t codes[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // The sum of kE2m1CodeBits << 4i over the eight is taken off once.
    uint32_t word = -(kE2m1CodeBits * 0x11111111u);
#pragma unroll
    for (int i = 0; i < 8; ++i) word += E2m1CodeBits(v[8 * h + i]) << (4 * i);
    codes[h] = scale.encode == 0.0f ? 0u : word | Signs8(block, 8 * h);
  }
  return make_uint2(codes[0], codes[1]);
}

// Two bf16 words' signs.
__device__ __forceinline__ uint32_t SignsOfPair(const Block<uint16_t>& block, int pair) {
  return block.Word(pair) & 0x80008000u;
}

__device__ __forceinline__ uint32_t SignsOfPair(const Block<float>& block, int pair) {
  return __byte_perm(Bits(block.Value(2 * pair)), Bits(block.Value(2 * pair + 1)), 0x7632) &
         0x80008000u;
}

// What a block is whose codes are all 0: zeros, or NaN where the block scale is.
__device__ __forceinline__ Block<uint16_t> ConstantBlock(uint8_t sf) {
  const uint32_t word = sf == kNanBlockScale ? (kNanBits >> 16) * 0x10001u : 0u;
  return {make_uint4(word, word, word, word), make_uint4(word, word, word, word)};
}

// 16 values, code times block scale in bf16.
template <class T>
__device__ __forceinline__ Block<uint16_t> ExpandBlock(const Block<T>& block, uint32_t largest,
                                                       const BlockScale& scale) {
  if (scale.encode == 0.0f) return ConstantBlock(scale.sf);
  Block<uint16_t> out;
  float v[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    v[i] = Mul(RoundToE2m1(Mul(fabsf(block.Value(i)), scale.encode)), E4m3ToFloat(scale.sf));
  }
  RoundBlock(v, &out);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    out.half[h].x |= SignsOfPair(block, 4 * h);
    out.half[h].y |= SignsOfPair(block, 4 * h + 1);
    out.half[h].z |= SignsOfPair(block, 4 * h + 2);
    out.half[h].w |= SignsOfPair(block, 4 * h + 3);
  }
  return out;
}

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_NVFP4_BLOCK_CUH_
