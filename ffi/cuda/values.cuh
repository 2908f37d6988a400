// Loading and storing bf16 (as uint16_t) and fp32 values, several at a time.
//
// XLA aligns every buffer to 16 bytes or more, so a row whose size is a multiple of a pack's is
// read in packs from its first element on.
#ifndef JAXFP4_CUDA_VALUES_CUH_
#define JAXFP4_CUDA_VALUES_CUH_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "ffi/numerics.h"

namespace jaxfp4::cuda {

// As many values as one load instruction takes.
template <class T>
constexpr int kWidestPack = 16 / sizeof(T);

// kCount values as they are in memory, 2, 4, 8 or 16 bytes. Two bf16 share a register.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  static constexpr bool kPaired = sizeof(T) == 2 && kCount % 2 == 0;
  using Word = std::conditional_t<kPaired, uint32_t, T>;
  Word word[kPaired ? kCount / 2 : kCount];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (kPaired) {
      return FromBits(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xFFFF0000u);
    } else if constexpr (sizeof(T) == 2) {
      return Bf16ToFloat(word[i]);
    } else {
      return word[i];
    }
  }
};

template <int kCount, class T>
__device__ __forceinline__ Pack<T, kCount> LoadPack(const T* p) {
  return *reinterpret_cast<const Pack<T, kCount>*>(p);
}

template <int kCount>
__device__ __forceinline__ void StorePack(const float (&x)[kCount], float* out) {
  Pack<float, kCount> pack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) pack.word[i] = x[i];
  *reinterpret_cast<Pack<float, kCount>*>(out) = pack;
}

// Rounds as FloatToBf16 does, two values an instruction. Every NaN comes out as 0x7FFF, which is
// what FloatToBf16 makes of the NaN of the device's arithmetic.
template <int kCount>
__device__ __forceinline__ void StorePack(const float (&x)[kCount], uint16_t* out) {
  if constexpr (kCount == 1) {
    *out = __bfloat16_as_ushort(__float2bfloat16_rn(x[0]));
  } else {
    Pack<uint16_t, kCount> pack;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      memcpy(&pack.word[i], &pair, sizeof(pair));
    }
    *reinterpret_cast<Pack<uint16_t, kCount>*>(out) = pack;
  }
}

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_VALUES_CUH_
