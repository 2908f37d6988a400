// What a Hopper kernel says to the tensor cores and the copy engine, over CUTLASS's PTX wrappers.
//
// Operand tiles in shared memory are boxes of the copy engine with its 128-byte swizzle: lines of
// 128 bytes, 64 bf16. Where the lines run along the depth of the product (K-major) a tile of R rows
// and depth 64 is R lines. Where they run along its rows (MN-major) it is R / 64 boxes of 64 lines,
// one for each step of the depth.
#ifndef JAXFP4_CUDA_SM90_WGMMA_CUH_
#define JAXFP4_CUDA_SM90_WGMMA_CUH_

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"

namespace jaxfp4::cuda::sm90 {

using Major = cute::SM90::GMMA::Major;

constexpr int kSwizzleElements = 64;                  // bf16 in a line of 128 bytes
constexpr int kBoxBytes = 64 * kSwizzleElements * 2;  // a box of 64 lines

// The matrix descriptor of a tile at `address` (PTX ISA, "matrix descriptor" of wgmma).
template <Major major>
__device__ inline uint64_t Descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  // Eight lines are 1024 bytes apart; the next 64 rows of an MN-major tile are the next box.
  constexpr uint64_t kEightLines = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kNextBox = major == Major::MN ? uint64_t{kBoxBytes >> 4} << 16 : 0;
  return kSwizzle128 | kEightLines | kNextBox | ((address & 0x3FFFF) >> 4);
}

// What a step of 16 along the depth adds to a descriptor.
template <Major major>
constexpr uint64_t kDepthStep = (major == Major::K ? 16 * 2 : 16 * 128) >> 4;

template <int kColumns, Major a, Major b>
struct WgmmaAtom;
template <Major a, Major b>
struct WgmmaAtom<256, a, b> {
  using Type = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<a, b>;
};
template <Major a, Major b>
struct WgmmaAtom<192, a, b> {
  using Type = cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<a, b>;
};
template <Major a, Major b>
struct WgmmaAtom<128, a, b> {
  using Type = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<a, b>;
};

// sum[64 x kColumns] (+)= a[64 x 16] times b[16 x kColumns], of the calling warpgroup.
template <int kColumns, Major a, Major b, size_t... i>
__device__ inline void Wgmma(uint64_t descriptor_a, uint64_t descriptor_b,
                             float (&sum)[kColumns / 2], bool accumulate,
                             std::index_sequence<i...>) {
  using cute::SM90::GMMA::ScaleOut;
  WgmmaAtom<kColumns, a, b>::Type::fma(descriptor_a, descriptor_b, sum[i]...,
                                       accumulate ? ScaleOut::One : ScaleOut::Zero);
}

template <int kColumns, Major a, Major b>
__device__ inline void Wgmma(uint64_t descriptor_a, uint64_t descriptor_b,
                             float (&sum)[kColumns / 2], bool accumulate) {
  Wgmma<kColumns, a, b>(descriptor_a, descriptor_b, sum, accumulate,
                        std::make_index_sequence<kColumns / 2>());
}

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Ordinary writes to shared memory before this are seen by the tensor cores after it.
__device__ inline void FenceSharedWrites() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace jaxfp4::cuda::sm90

#endif  // JAXFP4_CUDA_SM90_WGMMA_CUH_
