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

constexpr int64_t kSharedBytes = 48 * 1024 - 256;  // of a thread block, without asking for more

// Blocks of 16 values that a thread keeps in registers: 32 of them hold what it reads.
template <class T, Front kFront>
constexpr int kBlocksPerThread = (sizeof(T) == 2 ? 4 : 2) / (kFront == Front::kSwiGlu ? 2 : 1);

// Values of a row that a thread block's registers hold.
template <class T, Front kFront>
constexpr int64_t kLongestRow = int64_t{kMaxThreads} * kBlocksPerThread<T, kFront> * kBlock;

// Shared memory for the rows of a thread block under RMSNorm; 0 where they do not fit or need none.
template <class T, Front kFront>
int64_t StagedBytes(int64_t depth, dim3 threads) {
  if (kFront != Front::kRmsNorm || depth > kLongestRow<T, kFront>) return 0;
  const int64_t bytes = threads.y * depth * static_cast<int64_t>(sizeof(T));
  return bytes <= kSharedBytes ? bytes : 0;
}

// Where `amax` is null each row finds its own, and its threads hold all of its blocks. Else
// blockIdx.y cuts the row into as many blocks as the threads hold.
template <class T, Front kFront, bool kExpanded, bool kFourOverSix>
__global__ void __launch_bounds__(kMaxThreads)
    EncodeRows(const __grid_constant__ QuantizeArgs args, const float* amax, bool staged) {
  constexpr int kPerThread = kBlocksPerThread<T, kFront>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;
  const int blocks = static_cast<int>(args.depth / kBlock);
  const int stride = blockDim.x;
  const int first = blockIdx.y * kPerThread * stride;
  const bool in_use = args.groups == 0 || row < UsedRows(args);
  const bool writes_scale =
      args.rows_per_scale == 1 && amax != args.scale && blockIdx.y == 0 && threadIdx.x == 0;
  const RowResults<kExpanded> results(args, row, in_use);
  const T* source = in_use ? SourceRow<T, kFront>(args, row) : nullptr;
  if (source == nullptr) {
    const float zero_amax = in_use && amax != nullptr ? amax[row / args.rows_per_scale] : 0.0f;
    const RowScale scale = MakeRowScale(zero_amax, args.pow2_scale);
    if (writes_scale) args.scale[row] = scale.scale;
    const int last = min(blocks, first + kPerThread * stride);
    for (int b = first + threadIdx.x; b < last; b += stride) {
      results.StoreConstant(b, scale.finite ? 0 : kNanBlockScale);
    }
    return;
  }

  // Threads past the end of the row repeat its last block, which changes nothing and costs less
  // than to skip it.
  const auto begins_in_row = [&](int i) { return i == 0 || first + i * stride < blocks; };
  const auto place = [&](int i) {
    return min(first + i * stride + static_cast<int>(threadIdx.x), blocks - 1);
  };
  RawBlock<T, kFront> raw[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    raw[i] = {};
    if (begins_in_row(i)) raw[i] = LoadRaw<kFront>(source, args.depth, place(i));
  }
  float inverse_rms = 0.0f;
  if constexpr (kFront == Front::kRmsNorm) {
    if (staged) {
      extern __shared__ uint4 shared[];
      T* staged_row = reinterpret_cast<T*>(shared) + threadIdx.y * args.depth;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (begins_in_row(i)) {
          *reinterpret_cast<Block<T>*>(staged_row + place(i) * kBlock) = raw[i].x;
        }
      }
      SyncRow();
      inverse_rms = InverseRmsOfRow(staged_row, args.depth, args.eps);
    } else {
      inverse_rms = InverseRmsOfRow(source, args.depth, args.eps);
    }
  }
  Block<T> block[kPerThread];
  uint32_t largest[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    block[i] = {};
    if (begins_in_row(i)) block[i] = ApplyFront(raw[i], inverse_rms, args.front_weight, place(i));
    largest[i] = LargestMagnitude(block[i]);
  }

  float row_amax;
  if (amax != nullptr) {
    row_amax = __ldg(amax + (args.rows_per_scale == 1 ? row : row / args.rows_per_scale));
  } else {
    uint32_t of_thread = largest[0];
#pragma unroll
    for (int i = 1; i < kPerThread; ++i) of_thread = max(of_thread, largest[i]);
    row_amax = FromBits(MaxOverRow(of_thread));
  }
  const RowScale scale = MakeRowScale(row_amax, args.pow2_scale);
  if (writes_scale) args.scale[row] = scale.scale;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (!begins_in_row(i)) break;
    results.Store(place(i), block[i], largest[i],
                  ScaleOfBlock<kFourOverSix>(block[i], largest[i], scale));
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
  const int blocks = static_cast<int>(args.depth / kBlock);
  uint32_t largest = 0;
  for (int64_t row = begin; row < end; ++row) {
    const T* source = SourceRow<T, kFront>(args, row);
    if (source != nullptr) {
      float inverse_rms = 0.0f;
      if constexpr (kFront == Front::kRmsNorm) {
        inverse_rms = InverseRmsOfRow(source, args.depth, args.eps);
      }
#pragma unroll(kBlocksPerThread<T, kFront>)
      for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
        const RawBlock<T, kFront> raw = LoadRaw<kFront>(source, args.depth, b);
        largest =
            max(largest, LargestMagnitude(ApplyFront(raw, inverse_rms, args.front_weight, b)));
      }
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
template <class T, Front kFront>
dim3 RowThreads(int64_t depth) {
  const int64_t per_warp = kWarpSize * kBlocksPerThread<T, kFront>;
  const int64_t warps = (depth / kBlock + per_warp - 1) / per_warp;
  const unsigned threads =
      static_cast<unsigned>(kWarpSize * std::min<int64_t>(warps, kMaxThreads / kWarpSize));
  return dim3(threads, threads == kWarpSize ? kThreads / kWarpSize : 1);
}

template <class T, Front kFront, bool kExpanded>
cudaError_t Encode(cudaStream_t stream, const QuantizeArgs& args, const float* amax) {
  const dim3 threads = RowThreads<T, kFront>(args.depth);
  const int64_t values = static_cast<int64_t>(threads.x) * kBlocksPerThread<T, kFront> * kBlock;
  const dim3 grid(static_cast<unsigned>((args.rows + threads.y - 1) / threads.y),
                  static_cast<unsigned>((args.depth + values - 1) / values));
  const int64_t shared = StagedBytes<T, kFront>(args.depth, threads);
  if (args.four_over_six) {
    EncodeRows<T, kFront, kExpanded, true>
        <<<grid, threads, shared, stream>>>(args, amax, shared != 0);
  } else {
    EncodeRows<T, kFront, kExpanded, false>
        <<<grid, threads, shared, stream>>>(args, amax, shared != 0);
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
  const bool amax_first =
      amax == nullptr && (args.rows_per_scale != 1 || args.depth > kLongestRow<T, kFront>);
  if (amax_first) {
    if (cudaError_t error = cudaMemsetAsync(args.scale, 0, scales * sizeof(float), stream);
        error != cudaSuccess) {
      return error;
    }
    int sms = 0;
    if (cudaError_t error = MultiprocessorCount(&sms); error != cudaSuccess) return error;
    const dim3 threads = RowThreads<T, kFront>(args.depth);
    FindAmax<T, kFront><<<sms * kRowRangesPerSm, threads, 0, stream>>>(args);
    amax = args.scale;
  }
  if (cudaError_t error = args.values != nullptr ? Encode<T, kFront, true>(stream, args, amax)
                                                 : Encode<T, kFront, false>(stream, args, amax);
      error != cudaSuccess) {
    return error;
  }
  if (args.rows_per_scale != 1 || amax_first) {
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
