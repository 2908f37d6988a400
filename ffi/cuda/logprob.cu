// Log-probability, entropy and log-sum-exp of rows of logits.
//
// A thread block takes a row. Its warps measure the row's blocks of 512 logits in turn, each lane
// with the 16 values of its partial sums in registers, so every logit is read once. Then one warp
// merges the blocks in order, 32 at a time: the running maxima and all the exponentials are found
// in parallel, and the chain that is left is a multiplication and an addition a block.
//
// For each logit there are a division, an exponential and two sums, some forty instructions, which
// take about as long as reading it from memory.
#include "ffi/cuda/exp.cuh"
#include "ffi/cuda/logprob.h"
#include "ffi/cuda/row_lanes.cuh"
#include "ffi/cuda/values.cuh"
#include "ffi/logprob.h"
#include "ffi/numerics.h"

namespace jaxfp4::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kSteps = kVocabularyBlock / kWarp;

// Divides a lane's logits by the temperature as Div does. Every lane of a warp calls it.
class Temper {
 public:
  explicit __device__ __forceinline__ Temper(float temperature)
      : temperature_(temperature),
        reciprocal_(Reciprocal(temperature)),
        plain_(kSmallest < temperature && temperature < kLargest) {}

  __device__ __forceinline__ void operator()(float (&z)[kSteps]) const {
    if (temperature_ == 1.0f) return;
    float smallest = 1.0f, largest = 1.0f;  // NaN is passed over: its quotient is NaN either way
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      smallest = fminf(smallest, fabsf(z[s]));
      largest = fmaxf(largest, fabsf(z[s]));
    }
    if (__all_sync(kAllLanes, plain_ && kSmallest < smallest && largest < kLargest)) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) z[s] = DivideBy(z[s], temperature_, reciprocal_);
    } else {
#pragma unroll 1
      for (int s = 0; s < kSteps; ++s) z[s] = Div(z[s], temperature_);
    }
  }

 private:
  // Between them DivideBy is exact.
  static constexpr float kSmallest = 1e-15f, kLargest = 1e15f;
  float temperature_, reciprocal_;
  bool plain_;
};

// Of the block of `count` logits at `logits`, in all lanes.
__device__ __forceinline__ Statistics Measure(const float* __restrict__ logits, int count,
                                              const Temper& temper, int lane) {
  float z[kSteps];
  if (count == kVocabularyBlock) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) z[s] = logits[s * kWarp + lane];
  } else {
    // What is past the end adds nothing, as a logit of -infinity.
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      z[s] = s * kWarp + lane < count ? logits[s * kWarp + lane] : kMinusInf;
    }
  }
  temper(z);
  float largest = kMinusInf;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) largest = fmaxf(largest, z[s]);
  largest = MaxOverLanes(largest);
  const float base = BlockBase(largest);
  float sum[1] = {}, weighted[1] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    // Exp is 0 from -104 down, so that no term changes, not even that of -infinity.
    const float offset = ClampFromBelow(Sub(z[s], base), -104.0f);
    const float exponential = __int_as_float(max(ExpBits(offset), 0));
    sum[0] = Add(sum[0], exponential);
    weighted[0] = Add(weighted[0], Mul(exponential, offset));
  }
  Statistics part = {largest, RowTreeOverLanes(sum), RowTreeOverLanes(weighted)};
  // ExpBits loses a NaN, the product does not.
  if (part.weighted != part.weighted) part.sum = part.weighted;
  return part;
}

// Merges parts[count], in order, into `all`. Every lane of a warp calls it and gets the result.
__device__ Statistics MergeInOrder(Statistics all, const Statistics* parts, int count, int lane) {
  for (int first = 0; first < count; first += kWarp) {
    Statistics part = {kMinusInf, 0.0f, 0.0f};  // a part that Merge passes over
    if (first + lane < count) part = parts[first + lane];
    // The running largest value after this lane's part, and before it.
    float after = fmaxf(part.largest, all.largest);
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const float other = __shfl_up_sync(kAllLanes, after, step);
      if (lane >= step) after = fmaxf(after, other);
    }
    float before = __shfl_up_sync(kAllLanes, after, 1);
    if (lane == 0) before = all.largest;
    const float shift = Sub(before, after), scale = Exp(shift);
    const Statistics right = Rebase(part, after);
    all.largest = __shfl_sync(kAllLanes, after, kWarp - 1);
    const int parts_here = min(count - first, kWarp);
    for (int i = 0; i < parts_here; ++i) {
      const float part_sum = __shfl_sync(kAllLanes, part.sum, i);
      const float right_sum = __shfl_sync(kAllLanes, right.sum, i);
      const float right_weighted = __shfl_sync(kAllLanes, right.weighted, i);
      const float left_shift = __shfl_sync(kAllLanes, shift, i);
      const float left_scale = __shfl_sync(kAllLanes, scale, i);
      if (part_sum == 0.0f) continue;
      if (all.sum == 0.0f) {
        // Rebased on its own largest value it is the part itself.
        all.sum = right_sum;
        all.weighted = right_weighted;
        continue;
      }
      const Statistics left = Rebase(all, all.largest, left_shift, left_scale);
      all.sum = Add(left.sum, right_sum);
      all.weighted = Add(left.weighted, right_weighted);
    }
  }
  return all;
}

__global__ void __launch_bounds__(kThreads) FoldLogitsKernel(LogprobArgs args) {
  extern __shared__ Statistics parts[];  // of the row's blocks
  const int64_t row = blockIdx.x;
  const int vocabulary = static_cast<int>(args.vocabulary);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int blocks = (vocabulary + kVocabularyBlock - 1) / kVocabularyBlock;
  const float* logits = args.logits + row * args.vocabulary;
  const float temperature = args.temperature[row];
  const Temper temper(temperature);
  for (int b = warp; b < blocks; b += kWarps) {
    const int first = b * kVocabularyBlock;
    const Statistics part =
        Measure(logits + first, min(vocabulary - first, kVocabularyBlock), temper, lane);
    if (lane == 0) parts[b] = part;
  }
  __syncthreads();
  if (warp != 0) return;

  LogprobState state = args.state == nullptr ? EmptyLogprobState() : args.state[row];
  state.all = MergeInOrder(state.all, parts, blocks, lane);
  const int32_t token = args.tokens[row];
  if (token >= 0 && token < vocabulary) state.token_z = Div(logits[token], temperature);
  if (lane != 0) return;
  if (args.new_state != nullptr) args.new_state[row] = state;
  const LogprobResult result = FinishLogprob(state);
  args.logprob[row] = result.logprob;
  args.entropy[row] = result.entropy;
  args.lse[row] = result.lse;
}

}  // namespace

cudaError_t FoldLogits(cudaStream_t stream, const LogprobArgs& args) {
  if (args.rows == 0) return cudaSuccess;
  const int64_t blocks = (args.vocabulary + kVocabularyBlock - 1) / kVocabularyBlock;
  FoldLogitsKernel<<<args.rows, kThreads, blocks * sizeof(Statistics), stream>>>(args);
  return cudaGetLastError();
}

}  // namespace jaxfp4::cuda
