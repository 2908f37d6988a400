#include "ffi/cpu/quantize.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "ffi/cpu/float_values.h"
#include "ffi/cpu/row_reductions.h"
#include "ffi/numerics.h"
#include "ffi/scale_layout.h"

namespace jaxfp4::cpu {
namespace {

// One thread's buffers for a row. Block-wise values are 32 bits wide, so that loops vectorise.
struct RowBuffers {
  std::vector<float> values;        // [K], after the front, in fp32
  std::vector<uint32_t> bmax;       // [K/16], magnitudes as bits
  std::vector<float> block_enc;     // [K/16]
  std::vector<uint32_t> sf;         // [K/16], e4m3 bytes
  std::vector<uint32_t> code_mask;  // [K/16]: 0x0F, or 0 where every code of the block is 0
  std::vector<uint8_t> codes;       // [K], one a byte

  void Resize(int64_t depth) {
    values.resize(depth);
    codes.resize(depth);
    bmax.resize(depth / kBlock);
    block_enc.resize(depth / kBlock);
    sf.resize(depth / kBlock);
    code_mask.resize(depth / kBlock);
  }
};

// x rounded to T, in fp32.
template <class T>
inline float Rounded(float x) {
  T stored;
  StoreFloat(x, &stored);
  return ToFloat(stored);
}

// The row's values in fp32; a front's result is rounded once to x's type.
template <class T>
void LoadRow(const QuantizeArgs& args, int64_t row, float* out) {
  const int64_t depth = args.depth;
  const int64_t source_row = args.gather == nullptr ? row : args.gather[row];
  if (source_row < 0 || source_row >= args.x_rows) {
    std::fill_n(out, depth, 0.0f);
    return;
  }
  const int64_t width = args.front == Front::kSwiGlu ? 2 * depth : depth;
  const T* x = static_cast<const T*>(args.x) + source_row * width;
  switch (args.front) {
    case Front::kNone:
      for (int64_t k = 0; k < depth; ++k) out[k] = ToFloat(x[k]);
      return;
    case Front::kSwiGlu:
      for (int64_t k = 0; k < depth; ++k) {
        out[k] = Rounded<T>(SwiGlu(ToFloat(x[k]), ToFloat(x[depth + k])));
      }
      return;
    case Front::kRmsNorm: {
      const float inverse_rms = InverseRms(RowSumOfSquares(x, depth), depth, args.eps);
      for (int64_t k = 0; k < depth; ++k) {
        out[k] = Rounded<T>(RmsNorm(ToFloat(x[k]), inverse_rms, args.front_weight[k]));
      }
      return;
    }
  }
}

typedef uint32_t Bits8 __attribute__((vector_size(32)));

inline Bits8 Max(Bits8 a, Bits8 b) { return a > b ? a : b; }

// Eight magnitudes as bits, a subnormal as zero.
inline Bits8 Magnitudes8(const float* values) {
  Bits8 bits;
  memcpy(&bits, values, sizeof(bits));
  bits &= 0x7FFFFFFFu;
  return bits < 0x00800000u ? Bits8{} : bits;
}

// Fills bmax and returns the row's own amax, as bits.
uint32_t BlockMaxima(int64_t depth, const float* values, uint32_t* bmax) {
  uint32_t amax = 0;
  for (int64_t b = 0; b < depth / kBlock; ++b) {
    const float* block = values + b * kBlock;
    Bits8 largest = Max(Magnitudes8(block), Magnitudes8(block + 8));
    largest = Max(largest, __builtin_shufflevector(largest, largest, 4, 5, 6, 7, 0, 1, 2, 3));
    largest = Max(largest, __builtin_shufflevector(largest, largest, 2, 3, 0, 1, 6, 7, 4, 5));
    largest = Max(largest, __builtin_shufflevector(largest, largest, 1, 0, 3, 2, 5, 4, 7, 6));
    bmax[b] = largest[0];
    amax = std::max(amax, bmax[b]);
  }
  return amax;
}

// Four over six: takes the block scale, of the two candidates, whose squared error is smaller.
uint8_t ChooseBlockScale(const float* values, float bmax, const RowScale& scale) {
  const float base = BlockScaleBase(bmax, scale.encode);
  const uint8_t candidates[2] = {E4m3FromFloat(base), E4m3FromFloat(Mul(1.5f, base))};
  float errors[2];
  for (int c = 0; c < 2; ++c) {
    const float sf = E4m3ToFloat(candidates[c]);
    const float block_enc = candidates[c] == 0 ? 0.0f : BlockEncode(candidates[c], scale.scale);
    float squares[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      const float decoded = Mul(E2m1ToFloat(E2m1FromFloat(Mul(values[i], block_enc))), sf);
      const float error = Sub(Mul(values[i], scale.encode), decoded);
      squares[i] = Mul(error, error);
    }
    float sum = 0.0f;
    for (int i = 0; i < kBlock; ++i) sum = Add(sum, squares[i]);
    errors[c] = sum;
  }
  return errors[1] < errors[0] ? candidates[1] : candidates[0];
}

// Block scales and codes of a row whose values and bmax are in the buffers.
void EncodeRow(const QuantizeArgs& args, const RowScale& row_scale, RowBuffers& buffers) {
  const int64_t blocks = args.depth / kBlock;
  const RowScale scale = row_scale;
  const float* __restrict values = buffers.values.data();
  const uint32_t* __restrict bmax = buffers.bmax.data();
  uint32_t* __restrict sf = buffers.sf.data();
  float* __restrict block_enc = buffers.block_enc.data();
  uint32_t* __restrict code_mask = buffers.code_mask.data();
  for (int64_t b = 0; b < blocks; ++b) {
    // A magnitude that is not finite is replaced below; 0 here keeps the conversions defined.
    const float largest = FromBits(bmax[b] < kInfBits ? bmax[b] : 0u);
    sf[b] = E4m3FromFloat(BlockScaleBase(largest, scale.encode));
  }
  if (args.four_over_six) {
    for (int64_t b = 0; b < blocks; ++b) {
      if (bmax[b] < kInfBits) {
        sf[b] = ChooseBlockScale(values + b * kBlock, FromBits(bmax[b]), scale);
      }
    }
  }
  const uint32_t first_nonfinite = scale.finite ? kInfBits : 0u;
  for (int64_t b = 0; b < blocks; ++b) {
    // Where sf is 0 this is infinite and not used.
    const float enc = BlockEncode(static_cast<uint8_t>(sf[b]), scale.scale);
    const bool finite = bmax[b] < first_nonfinite;
    const bool zero = (sf[b] == 0) | !finite;
    block_enc[b] = zero ? 0.0f : enc;
    code_mask[b] = zero ? 0u : 0x0Fu;
    sf[b] = finite ? sf[b] : kNanBlockScale;
  }
  uint8_t* __restrict codes = buffers.codes.data();
  for (int64_t b = 0; b < blocks; ++b) {
    const float enc = block_enc[b];
    const uint32_t mask = code_mask[b];
    uint32_t block[kBlock];  // a loop of its own for each width, or the compiler takes the narrower
    for (int i = 0; i < kBlock; ++i) {
      block[i] = E2m1FromFloat(Mul(values[b * kBlock + i], enc)) & mask;
    }
    for (int i = 0; i < kBlock; ++i) codes[b * kBlock + i] = static_cast<uint8_t>(block[i]);
  }
}

void StoreRow(const QuantizeArgs& args, int64_t row, const RowBuffers& buffers) {
  const int64_t blocks = args.depth / kBlock;
  const uint8_t* __restrict codes = buffers.codes.data();
  if (args.values != nullptr) {
    uint16_t* __restrict out = args.values + row * args.depth;
    for (int64_t b = 0; b < blocks; ++b) {
      const float sf = E4m3ToFloat(static_cast<uint8_t>(buffers.sf[b]));
      for (int i = 0; i < kBlock; ++i) {
        out[b * kBlock + i] = FloatToBf16(Mul(E2m1ToFloat(codes[b * kBlock + i]), sf));
      }
    }
    return;
  }
  uint8_t* __restrict out = args.codes + row * (args.depth / 2);
  for (int64_t i = 0; i < args.depth / 2; ++i) {
    uint16_t pair;  // the even code in the low byte
    memcpy(&pair, codes + 2 * i, sizeof(pair));
    out[i] = static_cast<uint8_t>(pair | pair >> 4);
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t offset = args.row_slots == nullptr
                               ? row * blocks + b
                               : TiledScaleOffset(args.row_slots[row], b, blocks);
    args.block_scales[offset] = static_cast<uint8_t>(buffers.sf[b]);
  }
}

void StoreUnusedRow(const QuantizeArgs& args, int64_t row) {
  if (args.values != nullptr) {
    memset(args.values + row * args.depth, 0, args.depth * sizeof(uint16_t));
    return;
  }
  memset(args.codes + row * (args.depth / 2), 0, args.depth / 2);
  if (args.row_slots == nullptr) {
    const int64_t blocks = args.depth / kBlock;
    memset(args.block_scales + row * blocks, 0, blocks);
  }
}

RowBuffers& ThreadBuffers(int64_t depth) {
  thread_local RowBuffers buffers;
  buffers.Resize(depth);
  return buffers;
}

}  // namespace

template <class T>
void Quantize(Pool& pool, const QuantizeArgs& args) {
  const int64_t grain = std::max<int64_t>(1, 16384 / args.depth);
  const int64_t scales = args.rows_per_scale == 0 ? 0 : args.rows / args.rows_per_scale;
  const bool own_scale = args.amax == nullptr && args.rows_per_scale == 1;

  // The amax of every scale that spans several rows, as bits: an atomic max needs no order.
  std::vector<std::atomic<uint32_t>> shared_amax(own_scale ? 0 : scales);
  if (args.amax != nullptr) {
    for (int64_t s = 0; s < scales; ++s) shared_amax[s] = Bits(args.amax[s]);
  } else if (!own_scale) {
    ParallelRanges(pool, args.used_rows, grain, [&](int64_t begin, int64_t end) {
      RowBuffers& buffers = ThreadBuffers(args.depth);
      for (int64_t row = begin; row < end; ++row) {
        LoadRow<T>(args, row, buffers.values.data());
        const uint32_t amax = BlockMaxima(args.depth, buffers.values.data(), buffers.bmax.data());
        std::atomic<uint32_t>& largest = shared_amax[row / args.rows_per_scale];
        uint32_t seen = largest.load();
        while (seen < amax && !largest.compare_exchange_weak(seen, amax)) {
        }
      }
    });
  }

  if (!own_scale) {
    for (int64_t s = 0; s < scales; ++s) {
      args.scale[s] = MakeRowScale(FromBits(shared_amax[s]), args.pow2_scale).scale;
    }
  }
  ParallelRanges(pool, args.rows, grain, [&](int64_t begin, int64_t end) {
    RowBuffers& buffers = ThreadBuffers(args.depth);
    for (int64_t row = begin; row < end; ++row) {
      if (row >= args.used_rows) {
        StoreUnusedRow(args, row);
        if (args.rows_per_scale == 1) args.scale[row] = 1.0f;
        continue;
      }
      LoadRow<T>(args, row, buffers.values.data());
      const uint32_t amax = BlockMaxima(args.depth, buffers.values.data(), buffers.bmax.data());
      const uint32_t used = own_scale ? amax : shared_amax[row / args.rows_per_scale].load();
      const RowScale scale = MakeRowScale(FromBits(used), args.pow2_scale);
      if (own_scale) args.scale[row] = scale.scale;
      EncodeRow(args, scale, buffers);
      StoreRow(args, row, buffers);
    }
  });
}

template void Quantize<float>(Pool& pool, const QuantizeArgs& args);
template void Quantize<uint16_t>(Pool& pool, const QuantizeArgs& args);

}  // namespace jaxfp4::cpu
