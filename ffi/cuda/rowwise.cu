// RMSNorm, SwiGLU and QK-norm with RoPE.
//
// All three read each value once and write each result once, so memory bounds them.
//
// * RMSNorm: 32 / kPerLane lanes a row, which stays in registers between its sum of squares and
//   its result up to 32 * kSteps values; a wider row is read a second time, from the L2 cache.
// * SwiGLU: no sums, so every thread takes 16 bytes of gates and of ups wherever they are.
// * QK-norm and RoPE: a block takes a few tokens, computes their cosines and sines once into shared
//   memory and then goes through their heads as RMSNorm does through rows. Where both halves of a
//   head are whole steps, an element and its partner are in the same lane.
#include <algorithm>

#include "ffi/cuda/exp.cuh"
#include "ffi/cuda/grid.cuh"
#include "ffi/cuda/row_lanes.cuh"
#include "ffi/cuda/rowwise.h"
#include "ffi/cuda/values.cuh"
#include "ffi/numerics.h"
#include "ffi/rotary.h"

namespace jaxfp4::cuda {
namespace {

// --- RMSNorm ---

constexpr int kNormThreads = 128;

template <class T, int kPer, int kSteps>
__global__ void __launch_bounds__(kNormThreads)
    RmsNormKernel(int64_t rows, int64_t width, const T* __restrict__ x,
                  const float* __restrict__ weight, float eps, T* __restrict__ y) {
  const RowLane<kPer> lane;
  // Every lane takes part in the shuffles; one past the last row reads row 0 and stores nothing.
  const bool inside = lane.row < rows;
  const T* in = x + (inside ? lane.row : 0) * width;
  T* out = y + lane.row * width + lane.column;

  constexpr int kBatch = kSteps * kWarp;
  const int64_t last = (width - 1) / kBatch * kBatch;
  Pack<T, kPer> packs[kSteps];
  float partial[kPer] = {};
  for (int64_t first = 0; first <= last; first += kBatch) {
    LoadSteps<kPer, kSteps>(in, first, width, lane.column, packs);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        const float value = packs[s][e];
        partial[e] = Add(partial[e], Mul(value, value));
      }
    }
  }
  const float inverse_rms = InverseRms(RowTreeOverLanes(partial), width, eps);
  if (!inside) return;

  // From the last batch, which is still in registers, down to the first.
  for (int64_t first = last; first >= 0; first -= kBatch) {
    if (first != last) LoadSteps<kPer, kSteps>(in, first, width, lane.column, packs);
    const int64_t left = width - first - lane.column;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s * kWarp >= left) break;
      const int64_t offset = first + s * kWarp;
      const Pack<float, kPer> scale = LoadPack<kPer>(weight + lane.column + offset);
      float result[kPer];
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        result[e] = RmsNorm(packs[s][e], inverse_rms, scale[e]);
      }
      StorePack<kPer>(result, out + offset);
    }
  }
}

template <int kPer, int kSteps, class T>
cudaError_t LaunchRmsNorm(cudaStream_t stream, int64_t rows, int64_t width, const T* x,
                          const float* weight, float eps, T* y) {
  const int64_t blocks = CeilDiv(rows, kNormThreads / RowLane<kPer>::kLanes);
  RmsNormKernel<T, kPer, kSteps>
      <<<blocks, kNormThreads, 0, stream>>>(rows, width, x, weight, eps, y);
  return cudaGetLastError();
}

// --- SwiGLU ---

constexpr int kSwiGluThreads = 256;

template <class T, int kCount>
__global__ void __launch_bounds__(kSwiGluThreads)
    SwiGluKernel(int64_t rows, int64_t width, const T* __restrict__ x, T* __restrict__ y) {
  const PackPlace<kCount> place;
  if (place.row >= rows || place.column >= width) return;
  const T* in = x + place.row * 2 * width + place.column;
  const Pack<T, kCount> gate = LoadPack<kCount>(in), up = LoadPack<kCount>(in + width);
  float largest = 0.0f;  // NaN is passed over
#pragma unroll
  for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, fabsf(gate[i]));
  float result[kCount];
  if (largest <= kLargestPlainGate) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) result[i] = PlainSwiGlu(gate[i], up[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) result[i] = SwiGlu(gate[i], up[i]);
  }
  StorePack<kCount>(result, y + place.row * width + place.column);
}

template <int kCount, class T>
cudaError_t LaunchSwiGlu(cudaStream_t stream, int64_t rows, int64_t width, const T* x, T* y) {
  const PackGrid grid(rows, width / kCount, kSwiGluThreads);
  SwiGluKernel<T, kCount><<<grid.blocks, grid.threads, 0, stream>>>(rows, width, x, y);
  return cudaGetLastError();
}

// --- QK-norm and RoPE ---

constexpr int kRopeThreads = 256;
constexpr int64_t kRopeBlocksWanted = 1024;  // below it, tokens are not gathered into blocks

__device__ void ComputeRotations(const float* __restrict__ inv_freq,
                                 const int32_t* __restrict__ positions, int count, int half,
                                 SineCosine* rotations) {
  for (int i = threadIdx.x; i < count * half; i += kRopeThreads) {
    const float position = static_cast<float>(positions[i / half]);
    rotations[i] = Rotate(ReduceAngle(Mul(position, inv_freq[i % half])));
  }
  __syncthreads();
}

// head_dim = 32 * kSteps, kSteps even.
template <class T, int kPer, int kSteps>
__global__ void __launch_bounds__(kRopeThreads)
    RopeKernel(QkNormRopeArgs<T> args, int tokens_per_block) {
  constexpr int kHalfSteps = kSteps / 2, kHalf = kHalfSteps * kWarp, kHeadDim = 2 * kHalf;
  extern __shared__ SineCosine rotations[];  // [tokens_per_block, kHalf]
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int64_t left = args.tokens - first;
  const int tokens = left < tokens_per_block ? static_cast<int>(left) : tokens_per_block;
  ComputeRotations(args.inv_freq, args.positions + first, tokens, kHalf, rotations);

  constexpr int kLanes = RowLane<kPer>::kLanes;
  const int column = static_cast<int>(threadIdx.x % kLanes) * kPer;
  const bool norm = args.weight != nullptr;
  Pack<float, kPer> weight[kSteps] = {};
  if (norm) LoadSteps<kPer, kSteps>(args.weight, 0, kHeadDim, column, weight);

  const int heads = static_cast<int>(args.heads), rows = tokens * heads;
  // Warps stay together: the loop ends for all lanes at once.
  for (int base = 0; base < rows; base += kRopeThreads / kLanes) {
    const int row = base + static_cast<int>(threadIdx.x) / kLanes;
    const bool inside = row < rows;
    const int64_t offset = (first * args.heads + (inside ? row : 0)) * kHeadDim;
    Pack<T, kPer> packs[kSteps];
    LoadSteps<kPer, kSteps>(args.x + offset, 0, kHeadDim, column, packs);
    float head[kSteps][kPer];
    float partial[kPer] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        head[s][e] = packs[s][e];
        partial[e] = Add(partial[e], Mul(head[s][e], head[s][e]));
      }
    }
    if (norm) {
      const float inverse_rms = InverseRms(RowTreeOverLanes(partial), kHeadDim, args.eps);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int e = 0; e < kPer; ++e) {
          head[s][e] = RmsNorm(head[s][e], inverse_rms, weight[s][e]);
        }
      }
    }
    if (!inside) continue;
    const SineCosine* rotation = rotations + row / heads * kHalf + column;
    T* out = args.y + offset + column;
#pragma unroll
    for (int s = 0; s < kHalfSteps; ++s) {
      float low[kPer], high[kPer];
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        const SineCosine r = rotation[s * kWarp + e];
        const float a = head[s][e], b = head[s + kHalfSteps][e];
        low[e] = Sub(Mul(a, r.cosine), Mul(b, r.sine));
        high[e] = Add(Mul(b, r.cosine), Mul(a, r.sine));
      }
      StorePack<kPer>(low, out + s * kWarp);
      StorePack<kPer>(high, out + kHalf + s * kWarp);
    }
  }
}

// Any even head_dim: a warp a head, and the pairs are read a second time.
template <class T>
__global__ void __launch_bounds__(kRopeThreads)
    RopeOfAnyWidthKernel(QkNormRopeArgs<T> args, int tokens_per_block) {
  constexpr int kSteps = 4;
  extern __shared__ SineCosine rotations[];  // [tokens_per_block, half]
  const int64_t head_dim = args.head_dim;
  const int half = static_cast<int>(head_dim / 2);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int64_t left = args.tokens - first;
  const int tokens = left < tokens_per_block ? static_cast<int>(left) : tokens_per_block;
  ComputeRotations(args.inv_freq, args.positions + first, tokens, half, rotations);

  const int heads = static_cast<int>(args.heads), rows = tokens * heads;
  const int column = threadIdx.x % kWarp;
  for (int row = threadIdx.x / kWarp; row < rows; row += kRopeThreads / kWarp) {
    const T* in = args.x + (first * args.heads + row) * head_dim;
    T* out = args.y + (first * args.heads + row) * head_dim;
    float inverse_rms = 1.0f;
    if (args.weight != nullptr) {
      float partial[1] = {};
      for (int64_t begin = 0; begin < head_dim; begin += kSteps * kWarp) {
        Pack<T, 1> packs[kSteps];
        LoadSteps<1, kSteps>(in, begin, head_dim, column, packs);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const float value = packs[s][0];
          partial[0] = Add(partial[0], Mul(value, value));
        }
      }
      inverse_rms = InverseRms(RowTreeOverLanes(partial), head_dim, args.eps);
    }
    for (int i = column; i < half; i += kWarp) {
      float a = LoadPack<1>(in + i)[0], b = LoadPack<1>(in + half + i)[0];
      if (args.weight != nullptr) {
        a = RmsNorm(a, inverse_rms, args.weight[i]);
        b = RmsNorm(b, inverse_rms, args.weight[half + i]);
      }
      const SineCosine r = rotations[row / heads * half + i];
      const float low[1] = {Sub(Mul(a, r.cosine), Mul(b, r.sine))};
      const float high[1] = {Add(Mul(b, r.cosine), Mul(a, r.sine))};
      StorePack<1>(low, out + i);
      StorePack<1>(high, out + half + i);
    }
  }
}

}  // namespace

template <class T>
cudaError_t RmsNormRows(cudaStream_t stream, int64_t rows, int64_t width, const T* x,
                        const float* weight, float eps, T* y) {
  if (rows == 0 || width == 0) return cudaSuccess;
  constexpr int kPer = kPerLane<T>;
  if (width % kPer != 0) return LaunchRmsNorm<1, 16>(stream, rows, width, x, weight, eps, y);
  if (width <= 8 * kWarp) return LaunchRmsNorm<kPer, 8>(stream, rows, width, x, weight, eps, y);
  if (width <= 32 * kWarp) return LaunchRmsNorm<kPer, 32>(stream, rows, width, x, weight, eps, y);
  return LaunchRmsNorm<kPer, 64>(stream, rows, width, x, weight, eps, y);
}

template <class T>
cudaError_t SwiGluRows(cudaStream_t stream, int64_t rows, int64_t width, const T* x, T* y) {
  if (rows == 0 || width == 0) return cudaSuccess;
  if (width % kWidestPack<T> == 0) {
    return LaunchSwiGlu<kWidestPack<T>>(stream, rows, width, x, y);
  }
  return LaunchSwiGlu<1>(stream, rows, width, x, y);
}

template <class T>
cudaError_t QkNormRope(cudaStream_t stream, const QkNormRopeArgs<T>& args) {
  if (args.tokens == 0 || args.heads == 0 || args.head_dim == 0) return cudaSuccess;
  const int64_t half = args.head_dim / 2;
  // Enough tokens that every thread has an angle to compute, while there are enough blocks.
  const int tokens_per_block = static_cast<int>(std::clamp<int64_t>(
      std::min(kRopeThreads / half, args.tokens / kRopeBlocksWanted), 1, kRopeThreads));
  const int64_t blocks = CeilDiv(args.tokens, tokens_per_block);
  const size_t shared = tokens_per_block * half * sizeof(SineCosine);
  constexpr int kPer = kPerLane<T>;
  switch (args.head_dim) {
    case 64:
      RopeKernel<T, kPer, 2><<<blocks, kRopeThreads, shared, stream>>>(args, tokens_per_block);
      break;
    case 128:
      RopeKernel<T, kPer, 4><<<blocks, kRopeThreads, shared, stream>>>(args, tokens_per_block);
      break;
    case 256:
      RopeKernel<T, kPer, 8><<<blocks, kRopeThreads, shared, stream>>>(args, tokens_per_block);
      break;
    default:
      RopeOfAnyWidthKernel<T><<<blocks, kRopeThreads, shared, stream>>>(args, tokens_per_block);
  }
  return cudaGetLastError();
}

#define JAXFP4_INSTANTIATE(T)                                                                 \
  template cudaError_t RmsNormRows<T>(cudaStream_t, int64_t, int64_t, const T*, const float*, \
                                      float, T*);                                             \
  template cudaError_t SwiGluRows<T>(cudaStream_t, int64_t, int64_t, const T*, T*);           \
  template cudaError_t QkNormRope<T>(cudaStream_t, const QkNormRopeArgs<T>&);
JAXFP4_INSTANTIATE(float)
JAXFP4_INSTANTIATE(uint16_t)
#undef JAXFP4_INSTANTIATE

}  // namespace jaxfp4::cuda
