// Quantising rows to NVFP4.
//
// A warp takes a row of up to 2048 bf16 values, several warps a longer one, so that a thread holds
// its few blocks of 16 values in registers from the search for the row's amax to the encoding, and
// x is read once. A whole block in one thread needs no exchange for its own maximum and shares one
// division. What bounds it is memory, if a value costs no more than about twenty instructions; many
// small thread blocks, each at another stage of its row, keep loads in flight.
//
// A row too long for registers (over 32768 values) is read again for its encoding, and so is x
// where several rows share a scale that is not given.
#include <algorithm>

#include "ffi/cuda/device.h"
#include "ffi/cuda/quantize.h"
#include "ffi/cuda/quantize_rows.cuh"

namespace jaxfp4::cuda {
namespace {

constexpr int kThreads = 128;      // of a thread block where a warp takes a row
constexpr int kMaxThreads = 1024;  // of one row
constexpr int kRowRangesPerSm = 16;

// Blocks of 16 values that a thread keeps in registers.
template <class T>
constexpr int kBlocksPerThread = sizeof(T) == 2 ? 4 : 2;

template <bool kExpanded>
__device__ __forceinline__ void StoreUnusedRow(const QuantizeArgs& args, int64_t row) {
  const int64_t blocks = args.depth / kBlock;
  for (int64_t b = threadIdx.x; b < blocks; b += blockDim.x) {
    const int64_t index = row * blocks + b;
    if constexpr (kExpanded) {
      uint4* values = reinterpret_cast<uint4*>(args.values) + 2 * index;
      values[0] = values[1] = make_uint4(0u, 0u, 0u, 0u);
    } else {
      reinterpret_cast<uint2*>(args.codes)[index] = make_uint2(0u, 0u);
      if (args.tiled_scale_bytes == 0) args.block_scales[index] = 0;
    }
  }
  if (args.rows_per_scale == 1 && threadIdx.x == 0) args.scale[row] = 1.0f;
}

// Where `amax` is null each row finds its own.
template <class T, Front kFront, bool kExpanded, bool kFourOverSix>
__global__ void __launch_bounds__(kMaxThreads)
    EncodeRows(const __grid_constant__ QuantizeArgs args, const float* amax) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;
  if (row >= UsedRows(args)) {
    StoreUnusedRow<kExpanded>(args, row);
    return;
  }
  constexpr int kPerThread = kBlocksPerThread<T>;
  const int64_t blocks = args.depth / kBlock;
  const int64_t chunk = kPerThread * static_cast<int64_t>(blockDim.x);
  const Row<T, kFront> x(args, row);
  Block<T> block[kPerThread];
  uint32_t largest[kPerThread];
  const auto load = [&](int64_t first) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int64_t b = first + i * static_cast<int64_t>(blockDim.x) + threadIdx.x;
      if (b < blocks) block[i] = x.Load(b);
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int64_t b = first + i * static_cast<int64_t>(blockDim.x) + threadIdx.x;
      largest[i] = b < blocks ? LargestMagnitude(block[i]) : 0u;
    }
  };

  float row_amax;
  if (amax != nullptr) {
    row_amax = __ldg(amax + (args.rows_per_scale == 1 ? row : row / args.rows_per_scale));
    load(0);
  } else {
    uint32_t of_thread = 0;
    for (int64_t first = 0; first < blocks; first += chunk) {
      load(first);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) of_thread = max(of_thread, largest[i]);
    }
    row_amax = FromBits(MaxOverRow(of_thread));
    if (blocks > chunk) load(0);
  }
  const RowScale scale = MakeRowScale(row_amax, args.pow2_scale);
  if (args.rows_per_scale == 1 && threadIdx.x == 0) args.scale[row] = scale.scale;
  const bool tiled = args.tiled_scale_bytes != 0;
  const int64_t tiled_row = tiled ? TiledRow(args, row) : 0;

  for (int64_t first = 0; first < blocks; first += chunk) {
    if (first != 0) load(first);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int64_t b = first + i * static_cast<int64_t>(blockDim.x) + threadIdx.x;
      if (b >= blocks) continue;
      const BlockScale block_scale = ScaleOfBlock<kFourOverSix>(block[i], largest[i], scale);
      const int64_t index = row * blocks + b;
      if constexpr (kExpanded) {
        const Block<uint16_t> values = ExpandBlock(block[i], largest[i], block_scale);
        uint4* out = reinterpret_cast<uint4*>(args.values) + 2 * index;
        out[0] = values.half[0];
        out[1] = values.half[1];
      } else {
        reinterpret_cast<uint2*>(args.codes)[index] =
            EncodeBlock(block[i], largest[i], block_scale);
        args.block_scales[tiled ? TiledScaleOffset(tiled_row, b, blocks) : index] = block_scale.sf;
      }
    }
  }
}

// The largest magnitude that shares a scale, as bits, into `scale`, which is zero before. Each of
// gridDim.x * blockDim.y ranges of consecutive rows keeps its own as long as the scale is the same.
template <class T, Front kFront>
__global__ void __launch_bounds__(kMaxThreads) FindAmax(const __grid_constant__ QuantizeArgs args) {
  const int64_t range = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t ranges = static_cast<int64_t>(gridDim.x) * blockDim.y;
  const int64_t used = UsedRows(args);
  const int64_t rows_per_range = (used + ranges - 1) / ranges;
  const int64_t begin = range * rows_per_range, end = min(begin + rows_per_range, used);
  const int64_t blocks = args.depth / kBlock;
  uint32_t largest = 0;
  for (int64_t row = begin; row < end; ++row) {
    const Row<T, kFront> x(args, row);
#pragma unroll 4
    for (int64_t b = threadIdx.x; b < blocks; b += blockDim.x) {
      largest = max(largest, LargestMagnitude(x.Load(b)));
    }
    const bool last_of_scale = row + 1 == end || (row + 1) % args.rows_per_scale == 0;
    if (last_of_scale) {
      largest = __reduce_max_sync(kAllLanes, largest);
      if (threadIdx.x % kWarpSize == 0 && largest != 0) {
        atomicMax(reinterpret_cast<uint32_t*>(args.scale) + row / args.rows_per_scale, largest);
      }
      largest = 0;
    }
  }
}

// `scale` may be `amax`.
__global__ void MakeScales(int64_t scales, bool pow2_scale, const float* amax, float* scale) {
  const int64_t s = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (s < scales) scale[s] = MakeRowScale(amax[s], pow2_scale).scale;
}

// Threads of a row, so that its blocks fit into registers, and rows of a thread block.
template <class T>
dim3 RowThreads(int64_t depth) {
  const int64_t per_warp = kWarpSize * kBlocksPerThread<T>;
  const int64_t warps = (depth / kBlock + per_warp - 1) / per_warp;
  const unsigned threads =
      static_cast<unsigned>(kWarpSize * std::min<int64_t>(warps, kMaxThreads / kWarpSize));
  return dim3(threads, threads == kWarpSize ? kThreads / kWarpSize : 1);
}

template <class T, Front kFront, bool kExpanded>
cudaError_t Encode(cudaStream_t stream, const QuantizeArgs& args, const float* amax) {
  const dim3 threads = RowThreads<T>(args.depth);
  const dim3 grid(static_cast<unsigned>((args.rows + threads.y - 1) / threads.y));
  if (args.four_over_six) {
    EncodeRows<T, kFront, kExpanded, true><<<grid, threads, 0, stream>>>(args, amax);
  } else {
    EncodeRows<T, kFront, kExpanded, false><<<grid, threads, 0, stream>>>(args, amax);
  }
  return cudaGetLastError();
}

template <class T, Front kFront>
cudaError_t QuantizeFront(cudaStream_t stream, const QuantizeArgs& args) {
  const int64_t scales = args.rows / args.rows_per_scale;
  const float* amax = args.amax;
  if (args.tiled_scale_bytes != 0) {
    if (cudaError_t error = cudaMemsetAsync(args.block_scales, 0, args.tiled_scale_bytes, stream);
        error != cudaSuccess) {
      return error;
    }
  }
  if (amax == nullptr && args.rows_per_scale != 1) {
    if (cudaError_t error = cudaMemsetAsync(args.scale, 0, scales * sizeof(float), stream);
        error != cudaSuccess) {
      return error;
    }
    int sms = 0;
    if (cudaError_t error = MultiprocessorCount(&sms); error != cudaSuccess) return error;
    const dim3 threads = RowThreads<T>(args.depth);
    FindAmax<T, kFront><<<sms * kRowRangesPerSm, threads, 0, stream>>>(args);
    amax = args.scale;
  }
  if (cudaError_t error = args.values != nullptr ? Encode<T, kFront, true>(stream, args, amax)
                                                 : Encode<T, kFront, false>(stream, args, amax);
      error != cudaSuccess) {
    return error;
  }
  if (args.rows_per_scale != 1) {
    const unsigned grid = static_cast<unsigned>((scales + kThreads - 1) / kThreads);
    MakeScales<<<grid, kThreads, 0, stream>>>(scales, args.pow2_scale, amax, args.scale);
  }
  return cudaGetLastError();
}

}  // namespace

template <class T>
cudaError_t Quantize(cudaStream_t stream, const QuantizeArgs& args) {
  if (args.rows == 0) {
    return args.tiled_scale_bytes == 0
               ? cudaSuccess
               : cudaMemsetAsync(args.block_scales, 0, args.tiled_scale_bytes, stream);
  }
  switch (args.front) {
    case Front::kNone:
      return QuantizeFront<T, Front::kNone>(stream, args);
    case Front::kSwiGlu:
      return QuantizeFront<T, Front::kSwiGlu>(stream, args);
    case Front::kRmsNorm:
      return QuantizeFront<T, Front::kRmsNorm>(stream, args);
  }
  return cudaErrorInvalidValue;
}

template cudaError_t Quantize<float>(cudaStream_t stream, const QuantizeArgs& args);
template cudaError_t Quantize<uint16_t>(cudaStream_t stream, const QuantizeArgs& args);

}  // namespace jaxfp4::cuda
