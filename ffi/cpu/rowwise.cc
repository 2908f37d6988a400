#include "ffi/cpu/rowwise.h"

#include <algorithm>
#include <vector>

#include "ffi/cpu/float_values.h"
#include "ffi/cpu/row_reductions.h"
#include "ffi/numerics.h"
#include "ffi/rotary.h"

namespace jaxfp4::cpu {
namespace {

// Rows of so many elements that a task outweighs its scheduling.
inline int64_t RowGrain(int64_t width) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(width, 1));
}

// The index of the largest value not yet taken, ties to the lowest index. At least one must be
// left. Where the values are NaN that is the first one left.
inline size_t TakeLargest(const std::vector<float>& values, std::vector<char>& taken) {
  size_t best = 0;
  while (taken[best]) ++best;
  for (size_t i = best + 1; i < values.size(); ++i) {
    if (!taken[i] && values[i] > values[best]) best = i;
  }
  taken[best] = 1;
  return best;
}

// The row of y that slots[index] names, or null where it is outside y.
template <class T>
inline const T* SlotRow(const CombineExpertsArgs<T>& args, int64_t index) {
  const int64_t slot = args.slots[index];
  return slot >= 0 && slot < args.y_rows ? args.y + slot * args.width : nullptr;
}

}  // namespace

template <class T>
void RmsNormRows(Pool& pool, int64_t rows, int64_t width, const T* x, const float* weight,
                 float eps, T* y) {
  ParallelRanges(pool, rows, RowGrain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* in = x + row * width;
      T* out = y + row * width;
      const float inverse_rms = InverseRms(RowSumOfSquares(in, width), width, eps);
      for (int64_t i = 0; i < width; ++i) {
        StoreFloat(RmsNorm(ToFloat(in[i]), inverse_rms, weight[i]), &out[i]);
      }
    }
  });
}

template <class T>
void SwiGluRows(Pool& pool, int64_t rows, int64_t width, const T* x, T* y) {
  ParallelRanges(pool, rows, RowGrain(8 * width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = x + row * 2 * width;
      const T* up = gate + width;
      T* out = y + row * width;
      for (int64_t i = 0; i < width; ++i) {
        StoreFloat(SwiGlu(ToFloat(gate[i]), ToFloat(up[i])), &out[i]);
      }
    }
  });
}

template <class T>
void QkNormRope(Pool& pool, const QkNormRopeArgs<T>& args) {
  const int64_t head_dim = args.head_dim;
  const int64_t half = head_dim / 2;
  const int64_t grain = RowGrain(2 * args.heads * head_dim);
  ParallelRanges(pool, args.tokens, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(2 * half + head_dim);
    float* cosine = buffer.data();
    float* sine = cosine + half;
    float* head = sine + half;
    std::vector<ReducedAngle> angles(half);
    for (int64_t token = begin; token < end; ++token) {
      const float position = static_cast<float>(args.positions[token]);
      for (int64_t i = 0; i < half; ++i) angles[i] = ReduceAngle(Mul(position, args.inv_freq[i]));
      for (int64_t i = 0; i < half; ++i) {
        const SineCosine rotation = Rotate(angles[i]);
        sine[i] = rotation.sine;
        cosine[i] = rotation.cosine;
      }
      for (int64_t h = 0; h < args.heads; ++h) {
        const T* in = args.x + (token * args.heads + h) * head_dim;
        T* out = args.y + (token * args.heads + h) * head_dim;
        if (args.weight == nullptr) {
          for (int64_t i = 0; i < head_dim; ++i) head[i] = ToFloat(in[i]);
        } else {
          const float inverse_rms = InverseRms(RowSumOfSquares(in, head_dim), head_dim, args.eps);
          for (int64_t i = 0; i < head_dim; ++i) {
            head[i] = RmsNorm(ToFloat(in[i]), inverse_rms, args.weight[i]);
          }
        }
        for (int64_t i = 0; i < half; ++i) {
          const float first = head[i], second = head[half + i];
          StoreFloat(Sub(Mul(first, cosine[i]), Mul(second, sine[i])), &out[i]);
          StoreFloat(Add(Mul(second, cosine[i]), Mul(first, sine[i])), &out[half + i]);
        }
      }
    }
  });
}

void RouterTopK(Pool& pool, const RouterTopKArgs& args) {
  const int64_t num_experts = args.num_experts, k = args.k;
  ParallelRanges(pool, args.rows, RowGrain(16 * num_experts), [&](int64_t begin, int64_t end) {
    std::vector<float> probability(num_experts);
    std::vector<char> taken(num_experts);
    for (int64_t row = begin; row < end; ++row) {
      const float* logits = args.logits + row * num_experts;
      float* weights = args.weights + row * k;
      int32_t* experts = args.experts + row * k;

      const float largest = RowMax(logits, num_experts);
      for (int64_t e = 0; e < num_experts; ++e) probability[e] = Exp(Sub(logits[e], largest));
      const float sum = RowSum(probability.data(), num_experts);
      for (int64_t e = 0; e < num_experts; ++e) probability[e] = Div(probability[e], sum);

      std::fill(taken.begin(), taken.end(), 0);
      for (int64_t j = 0; j < k; ++j) {
        if (args.given_experts != nullptr) {
          experts[j] = args.given_experts[row * k + j];
        } else {
          experts[j] = static_cast<int32_t>(TakeLargest(probability, taken));
        }
        const bool known = experts[j] >= 0 && experts[j] < num_experts;
        weights[j] = known ? probability[experts[j]] : 0.0f;
      }
      if (!args.norm_topk_prob) continue;
      float total = 0.0f;
      for (int64_t j = 0; j < k; ++j) total = Add(total, weights[j]);
      // All of the given experts may be unknown or have a probability that underflows.
      for (int64_t j = 0; j < k; ++j) weights[j] = total == 0.0f ? 0.0f : Div(weights[j], total);
    }
  });
}

template <class T>
void CombineExperts(Pool& pool, const CombineExpertsArgs<T>& args, T* out) {
  const int64_t width = args.width, k = args.k;
  ParallelRanges(pool, args.rows, RowGrain(k * width), [&](int64_t begin, int64_t end) {
    std::vector<float> sum(width);
    for (int64_t row = begin; row < end; ++row) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      float* total = sum.data();
      for (int64_t index = row * k; index < (row + 1) * k; ++index) {
        const T* y = SlotRow(args, index);
        if (y == nullptr) continue;
        const float weight = args.weights[index];
        for (int64_t i = 0; i < width; ++i) total[i] = Add(total[i], Mul(weight, ToFloat(y[i])));
      }
      for (int64_t i = 0; i < width; ++i) StoreFloat(total[i], &out[row * width + i]);
    }
  });
}

template <class T>
void CombineExpertsGrad(Pool& pool, const CombineExpertsArgs<T>& args, const T* d_out, T* dy,
                        float* dweights) {
  const int64_t width = args.width, k = args.k;
  ParallelRanges(pool, args.rows, RowGrain(k * width), [&](int64_t begin, int64_t end) {
    std::vector<float> product(width);
    for (int64_t row = begin; row < end; ++row) {
      const T* d = d_out + row * width;
      for (int64_t index = row * k; index < (row + 1) * k; ++index) {
        const T* y = SlotRow(args, index);
        if (y != nullptr) {
          for (int64_t i = 0; i < width; ++i) product[i] = Mul(ToFloat(d[i]), ToFloat(y[i]));
        }
        dweights[index] = y == nullptr ? 0.0f : RowSum(product.data(), width);
      }
    }
  });

  // uses[first_use[s], first_use[s + 1]): the indices that name slot s, ascending.
  std::vector<int64_t> first_use(args.y_rows + 2, 0), uses(args.rows * k);
  for (int64_t index = 0; index < args.rows * k; ++index) {
    if (SlotRow(args, index) != nullptr) ++first_use[args.slots[index] + 2];
  }
  for (int64_t s = 2; s < args.y_rows + 2; ++s) first_use[s] += first_use[s - 1];
  for (int64_t index = 0; index < args.rows * k; ++index) {
    if (SlotRow(args, index) != nullptr) uses[first_use[args.slots[index] + 1]++] = index;
  }
  ParallelRanges(pool, args.y_rows, RowGrain(width), [&](int64_t begin, int64_t end) {
    std::vector<float> sum(width);
    for (int64_t slot = begin; slot < end; ++slot) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      float* total = sum.data();
      for (int64_t use = first_use[slot]; use < first_use[slot + 1]; ++use) {
        const T* d = d_out + uses[use] / k * width;
        const float weight = args.weights[uses[use]];
        for (int64_t i = 0; i < width; ++i) total[i] = Add(total[i], Mul(weight, ToFloat(d[i])));
      }
      for (int64_t i = 0; i < width; ++i) StoreFloat(total[i], &dy[slot * width + i]);
    }
  });
}

#define JAXFP4_INSTANTIATE(T)                                                               \
  template void RmsNormRows<T>(Pool&, int64_t, int64_t, const T*, const float*, float, T*); \
  template void SwiGluRows<T>(Pool&, int64_t, int64_t, const T*, T*);                       \
  template void QkNormRope<T>(Pool&, const QkNormRopeArgs<T>&);                             \
  template void CombineExperts<T>(Pool&, const CombineExpertsArgs<T>&, T*);                 \
  template void CombineExpertsGrad<T>(Pool&, const CombineExpertsArgs<T>&, const T*, T*, float*);
JAXFP4_INSTANTIATE(float)
JAXFP4_INSTANTIATE(uint16_t)
#undef JAXFP4_INSTANTIATE

}  // namespace jaxfp4::cpu
