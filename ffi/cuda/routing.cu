// The router's choice and the weighted sum of the chosen experts' outputs.
//
// * Router: a warp a row. The probabilities lie in shared memory as the integers of their bits,
//   which order like them since none is negative; each of the k rounds takes the largest over the
//   warp, then the lowest index that has it, and marks it as taken. Latency bounds it, not memory.
// * Combine: a thread takes 16 bytes of a token's row through its k experts in rank order. The
//   gathered rows of y are read once, so memory bounds it.
#include <algorithm>

#include "ffi/cuda/grid.cuh"
#include "ffi/cuda/routing.h"
#include "ffi/cuda/row_lanes.cuh"
#include "ffi/cuda/values.cuh"
#include "ffi/numerics.h"

namespace jaxfp4::cuda {
namespace {

// --- Router ---

constexpr int kRouterWarps = 4;
constexpr int kTaken = -1;  // below the bits of every probability

struct Choice {
  int probability, expert;
};

// The largest probability not taken yet, ties to the lowest index, which then is taken.
__device__ Choice TakeLargest(int* bits, int num_experts, int lane) {
  int best = kTaken, best_expert = num_experts;
  for (int e = lane; e < num_experts; e += kWarp) {
    if (bits[e] > best) {
      best = bits[e];
      best_expert = e;
    }
  }
  const int largest = __reduce_max_sync(kAllLanes, best);
  const int expert = __reduce_min_sync(kAllLanes, best == largest ? best_expert : num_experts);
  if (expert == best_expert) bits[expert] = kTaken;
  __syncwarp();
  return {largest, expert};
}

__global__ void __launch_bounds__(kRouterWarps* kWarp) RouterKernel(RouterTopKArgs args) {
  extern __shared__ int shared[];  // of each warp: probabilities' bits [num_experts], chosen [k]
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int num_experts = static_cast<int>(args.num_experts), k = static_cast<int>(args.k);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarp) + warp;
  if (row >= args.rows) return;
  const float* logits = args.logits + row * num_experts;
  int* probability = shared + warp * (num_experts + k);
  int* chosen = probability + num_experts;

  float largest = -INFINITY;
  for (int e = lane; e < num_experts; e += kWarp) largest = fmaxf(largest, logits[e]);
  largest = MaxOverLanes(largest);
  float partial[1] = {};
  for (int e = lane; e < num_experts; e += kWarp) {
    const float exponential = Exp(Sub(logits[e], largest));
    partial[0] = Add(partial[0], exponential);
    probability[e] = __float_as_int(exponential);
  }
  const float sum = RowTreeOverLanes(partial);
  for (int e = lane; e < num_experts; e += kWarp) {
    probability[e] = __float_as_int(Div(__int_as_float(probability[e]), sum));
  }
  __syncwarp();

  int32_t* experts = args.experts + row * k;
  if (args.given_experts != nullptr) {
    for (int j = lane; j < k; j += kWarp) {
      const int32_t expert = args.given_experts[row * k + j];
      experts[j] = expert;
      chosen[j] = expert >= 0 && expert < num_experts ? probability[expert] : 0;
    }
  } else if (sum != sum) {
    // One NaN makes them all NaN; none is larger than the first.
    for (int j = lane; j < k; j += kWarp) {
      experts[j] = j;
      chosen[j] = probability[j];
    }
  } else {
    for (int j = 0; j < k; ++j) {
      const Choice choice = TakeLargest(probability, num_experts, lane);
      if (lane == 0) {
        experts[j] = choice.expert;
        chosen[j] = choice.probability;
      }
    }
  }
  __syncwarp();

  float total = 0.0f;
  if (args.norm_topk_prob) {
    for (int j = 0; j < k; ++j) total = Add(total, __int_as_float(chosen[j]));
  }
  for (int j = lane; j < k; j += kWarp) {
    const float weight = __int_as_float(chosen[j]);
    // All of the given experts may be unknown or have a probability that underflows.
    const float normed = total == 0.0f ? 0.0f : Div(weight, total);
    args.weights[row * k + j] = args.norm_topk_prob ? normed : weight;
  }
}

// --- Combine ---

constexpr int kCombineThreads = 256;
constexpr int kCombineBatch = 8;  // rows of y that are on their way at once

template <class T, int kCount>
__global__ void __launch_bounds__(kCombineThreads)
    CombineKernel(CombineExpertsArgs<T> args, T* __restrict__ out) {
  const PackPlace<kCount> place;
  if (place.row >= args.rows || place.column >= args.width) return;
  const float* weights = args.weights + place.row * args.k;
  const int32_t* slots = args.slots + place.row * args.k;
  float total[kCount] = {};
  for (int64_t first = 0; first < args.k; first += kCombineBatch) {
    Pack<T, kCount> packs[kCombineBatch];
    float weight[kCombineBatch];
    bool adds[kCombineBatch];
#pragma unroll
    for (int j = 0; j < kCombineBatch; ++j) {
      const T* y = first + j < args.k ? args.SlotRow(slots[first + j]) : nullptr;
      adds[j] = y != nullptr;
      if (adds[j]) {
        packs[j] = LoadPack<kCount>(y + place.column);
        weight[j] = weights[first + j];
      }
    }
#pragma unroll
    for (int j = 0; j < kCombineBatch; ++j) {
      if (!adds[j]) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) total[i] = Add(total[i], Mul(weight[j], packs[j][i]));
    }
  }
  StorePack<kCount>(total, out + place.row * args.width + place.column);
}

template <int kCount, class T>
cudaError_t LaunchCombine(cudaStream_t stream, const CombineExpertsArgs<T>& args, T* out) {
  const PackGrid grid(args.rows, args.width / kCount, kCombineThreads);
  CombineKernel<T, kCount><<<grid.blocks, grid.threads, 0, stream>>>(args, out);
  return cudaGetLastError();
}

}  // namespace

cudaError_t RouterTopK(cudaStream_t stream, const RouterTopKArgs& args) {
  if (args.rows == 0 || args.k == 0) return cudaSuccess;
  const int64_t bytes = (args.num_experts + args.k) * sizeof(float);
  const int64_t warps =
      std::clamp<int64_t>(kLargestRouterRow * sizeof(float) / bytes, 1, kRouterWarps);
  RouterKernel<<<CeilDiv(args.rows, warps), warps * kWarp, warps * bytes, stream>>>(args);
  return cudaGetLastError();
}

template <class T>
cudaError_t CombineExperts(cudaStream_t stream, const CombineExpertsArgs<T>& args, T* out) {
  if (args.rows == 0 || args.width == 0) return cudaSuccess;
  if (args.width % kWidestPack<T> == 0) return LaunchCombine<kWidestPack<T>>(stream, args, out);
  return LaunchCombine<1>(stream, args, out);
}

template cudaError_t CombineExperts<float>(cudaStream_t, const CombineExpertsArgs<float>&, float*);
template cudaError_t CombineExperts<uint16_t>(cudaStream_t, const CombineExpertsArgs<uint16_t>&,
                                              uint16_t*);

}  // namespace jaxfp4::cuda
