// Which rows a quantizer reads and where it stores them: gather, group_sizes, the three layouts.
#ifndef JAXFP4_CUDA_QUANTIZE_ROWS_CUH_
#define JAXFP4_CUDA_QUANTIZE_ROWS_CUH_

#include <cstdint>

#include "ffi/cuda/nvfp4_block.cuh"
#include "ffi/cuda/quantize.h"
#include "ffi/cuda/quantize_fronts.cuh"
#include "ffi/numerics.h"
#include "ffi/scale_layout.h"

namespace jaxfp4::cuda {

// --- group_sizes, read on the device. A size below 0 counts as 0, and rows past the last as none.

// Rows in use. Every lane of the warp calls it.
__device__ __forceinline__ int64_t UsedRows(const QuantizeArgs& args) {
  if (args.groups == 0) return args.rows;
  int64_t sum = 0;
  for (int64_t g = threadIdx.x % kWarpSize; g < args.groups; g += kWarpSize) {
    sum += max(__ldg(args.group_sizes + g), 0);
  }
  for (int stride = kWarpSize / 2; stride > 0; stride /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, stride);
  }
  return min(sum, args.rows);
}

__device__ __forceinline__ int64_t SumOverLowerLanes(int64_t x, int lane) {
  for (int stride = 1; stride < kWarpSize; stride *= 2) {
    const int64_t lower = __shfl_up_sync(kAllLanes, x, stride);
    if (lane >= stride) x += lower;
  }
  return x;
}

// The place of a row in use among rows of which each group begins at its own 128-row tile. Every
// lane of the warp calls it with the same row.
__device__ __forceinline__ int64_t TiledRow(const QuantizeArgs& args, int64_t row) {
  const int lane = threadIdx.x % kWarpSize;
  int64_t first_row = 0, first_place = 0;  // of the 32 groups looked at
  for (int64_t base = 0; base < args.groups; base += kWarpSize) {
    const int64_t g = base + lane;
    const int64_t size = g < args.groups ? max(__ldg(args.group_sizes + g), 0) : 0;
    const int64_t padded = (size + kScaleTileRows - 1) / kScaleTileRows * kScaleTileRows;
    const int64_t end = first_row + SumOverLowerLanes(size, lane);
    const int64_t place_end = first_place + SumOverLowerLanes(padded, lane);
    const unsigned later = __ballot_sync(kAllLanes, row < end);
    if (later != 0) {
      const int64_t place = place_end - padded + (row - (end - size));
      return __shfl_sync(kAllLanes, place, __ffs(later) - 1);
    }
    first_row = __shfl_sync(kAllLanes, end, kWarpSize - 1);
    first_place = __shfl_sync(kAllLanes, place_end, kWarpSize - 1);
  }
  return row;
}

// The place in x of a row in use, or null where it is gathered from outside x.
template <class T, Front kFront>
__device__ __forceinline__ const T* SourceRow(const QuantizeArgs& args, int64_t row) {
  const int64_t source = args.gather == nullptr ? row : __ldg(args.gather + row);
  if (source < 0 || source >= args.x_rows) return nullptr;
  const int64_t width = kFront == Front::kSwiGlu ? 2 * args.depth : args.depth;
  return static_cast<const T*>(args.x) + source * width;
}

// Where and how a row's results are stored.
template <bool kExpanded>
class RowResults {
 public:
  // Every lane of the warp constructs it with the same row, in use if tiled.
  __device__ __forceinline__ RowResults(const QuantizeArgs& args, int64_t row, bool in_use)
      : tiled_(args.tiled_scale_bytes != 0) {
    const int64_t blocks = args.depth / kBlock;
    if constexpr (kExpanded) {
      values_ = reinterpret_cast<uint4*>(args.values + row * args.depth);
    } else {
      codes_ = reinterpret_cast<uint2*>(args.codes + row * (args.depth / 2));
      if (!tiled_) {
        block_scales_ = args.block_scales + row * blocks;
      } else if (in_use) {
        block_scales_ = args.block_scales + TiledScaleOffset(TiledRow(args, row), 0, blocks);
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void Store(int block, const Block<T>& x, uint32_t largest,
                                        const BlockScale& scale) const {
    if constexpr (kExpanded) {
      StoreValues(block, ExpandBlock(x, largest, scale));
    } else {
      StoreCodes(block, EncodeBlock(x, largest, scale), scale.sf);
    }
  }

  // A block of zeros, or of NaN where sf says so.
  __device__ __forceinline__ void StoreConstant(int block, uint8_t sf) const {
    if constexpr (kExpanded) {
      StoreValues(block, ConstantBlock(sf));
    } else {
      StoreCodes(block, make_uint2(0u, 0u), sf);
    }
  }

 private:
  __device__ __forceinline__ void StoreCodes(int block, uint2 codes, uint8_t sf) const {
    codes_[block] = codes;
    if (!tiled_) {
      block_scales_[block] = sf;
    } else if (block_scales_ != nullptr) {
      block_scales_[TiledScaleOffset(0, block, 0)] = sf;
    }
  }

  __device__ __forceinline__ void StoreValues(int block, const Block<uint16_t>& values) const {
    values_[2 * block] = values.half[0];
    values_[2 * block + 1] = values.half[1];
  }

  bool tiled_;
  uint4* values_ = nullptr;
  uint2* codes_ = nullptr;
  uint8_t* block_scales_ = nullptr;  // of block 0; null: not stored
};

// --- Reductions over a row's threads ---

// Every thread of the row calls it; every one gets the result.
__device__ __forceinline__ uint32_t MaxOverRow(uint32_t x) {
  x = __reduce_max_sync(kAllLanes, x);
  if (blockDim.x == kWarpSize) return x;
  __shared__ uint32_t of_warp[kWarpSize];
  if (threadIdx.x < kWarpSize) of_warp[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return __reduce_max_sync(kAllLanes, of_warp[threadIdx.x % kWarpSize]);
}

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_QUANTIZE_ROWS_CUH_
