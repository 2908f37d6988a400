// The host's side of Hopper's BF16 products: tensor maps, the choice of a tile, the launch.
#include <cuda.h>

#include <algorithm>

#include "ffi/cuda/bf16_gemm.h"
#include "ffi/cuda/device.h"
#include "ffi/cuda/sm90_bf16_gemm.cuh"

namespace jaxfp4::cuda {
namespace sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: the module must load where there is no driver.
EncodeTiled FindEncodeTiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess
             ? reinterpret_cast<EncodeTiled>(function)
             : nullptr;
}

// A bf16 operand [groups, lines, width], width contiguous, read in boxes of 64 x 64.
cudaError_t MakeMap(const uint16_t* data, int64_t width, int64_t lines, int64_t groups,
                    CUtensorMap* map) {
  static const EncodeTiled encode = FindEncodeTiled();
  if (encode == nullptr) return cudaErrorInsufficientDriver;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(lines),
                               static_cast<cuuint64_t>(groups)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(width) * 2,
                                 static_cast<cuuint64_t>(width * lines) * 2};
  const cuuint32_t box[3] = {64, 64, 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<uint16_t*>(data), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

struct Launch {
  CUtensorMap map_a, map_b;
  GemmParams params;
  int64_t max_slabs;  // of all groups' results along their rows, an upper bound
  bool ragged;        // groups share the slabs in a way that the host does not know
  cudaStream_t stream;
};

// The height of a tile, in slabs, that leaves the fewest slabs to the busiest cluster. Ragged
// groups take the tallest: it reads b least often.
int TileSlabs(const Launch& launch, int64_t column_pairs, int64_t clusters) {
  if (launch.ragged) return kMaxSlabs;
  int best = kMaxSlabs;
  int64_t best_cost = INT64_MAX;
  for (int slabs = kMaxSlabs; slabs >= 2; --slabs) {
    const int64_t tiles = (launch.max_slabs + slabs - 1) / slabs * column_pairs;
    // A tile costs its slabs, and a share for its columns and its start.
    const int64_t cost = (tiles + clusters - 1) / clusters * (8 * slabs + 2);
    if (cost < best_cost) {
      best = slabs;
      best_cost = cost;
    }
  }
  return best;
}

template <Major kMajorA, Major kMajorB, bool kRaggedDepth, class Y>
cudaError_t Run(Launch launch) {
  static_assert(sizeof(SharedMemory) <= 227 * 1024, "more shared memory than a block can have");
  const auto kernel = GemmGlobal<kMajorA, kMajorB, kRaggedDepth, Y>;
  int processors;
  if (cudaError_t error = MultiprocessorCount(&processors); error != cudaSuccess) return error;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               sizeof(SharedMemory));
      error != cudaSuccess) {
    return error;
  }
  constexpr int kPairColumns = kCluster * kTileColumns;
  const int64_t column_pairs = (launch.params.columns + kPairColumns - 1) / kPairColumns;
  launch.params.column_pairs = static_cast<int>(column_pairs);
  launch.params.slabs = TileSlabs(launch, column_pairs, processors / kCluster);
  const int64_t clusters =
      std::clamp<int64_t>(launch.max_slabs * column_pairs, 1, processors / kCluster);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * kCluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(SharedMemory);
  config.stream = launch.stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kCluster, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, launch.map_a, launch.map_b, launch.params);
}

// The operands of a forward product as a launch; likewise below.
cudaError_t MakeForward(const Gemm& gemm, cudaStream_t stream, Launch* launch) {
  launch->params = {gemm.y,
                    gemm.a_scale.data,
                    gemm.a_scale.count == 1 ? 0 : 1,
                    gemm.b_scale.data,
                    gemm.b_scale.count == 1 ? 0 : gemm.b_scale.count / gemm.groups,
                    gemm.b_scale.count > gemm.groups,
                    gemm.group_sizes,
                    static_cast<int>(gemm.groups),
                    gemm.rows,
                    0,
                    gemm.inputs,
                    gemm.outputs};
  launch->max_slabs = (gemm.rows + kSlabRows - 1) / kSlabRows + gemm.groups - 1;
  launch->ragged = gemm.groups > 1;
  launch->stream = stream;
  if (cudaError_t error = MakeMap(gemm.a, gemm.inputs, gemm.rows, 1, &launch->map_a);
      error != cudaSuccess) {
    return error;
  }
  return MakeMap(gemm.b, gemm.inputs, gemm.outputs, gemm.groups, &launch->map_b);
}

cudaError_t MakeInputGradient(const Gemm& gemm, cudaStream_t stream, Launch* launch) {
  launch->params = {gemm.y,
                    nullptr,
                    0,
                    nullptr,
                    0,
                    false,
                    gemm.group_sizes,
                    static_cast<int>(gemm.groups),
                    gemm.rows,
                    0,
                    gemm.outputs,
                    gemm.inputs};
  launch->max_slabs = (gemm.rows + kSlabRows - 1) / kSlabRows + gemm.groups - 1;
  launch->ragged = gemm.groups > 1;
  launch->stream = stream;
  if (cudaError_t error = MakeMap(gemm.a, gemm.outputs, gemm.rows, 1, &launch->map_a);
      error != cudaSuccess) {
    return error;
  }
  return MakeMap(gemm.b, gemm.inputs, gemm.outputs, gemm.groups, &launch->map_b);
}

cudaError_t MakeWeightGradient(const Gemm& gemm, cudaStream_t stream, Launch* launch) {
  launch->params = {gemm.y,
                    nullptr,
                    0,
                    nullptr,
                    0,
                    false,
                    gemm.group_sizes,
                    static_cast<int>(gemm.groups),
                    gemm.rows,
                    gemm.outputs,
                    0,
                    gemm.inputs};
  launch->max_slabs = (gemm.outputs + kSlabRows - 1) / kSlabRows * gemm.groups;
  launch->ragged = false;
  launch->stream = stream;
  if (cudaError_t error = MakeMap(gemm.a, gemm.outputs, gemm.rows, 1, &launch->map_a);
      error != cudaSuccess) {
    return error;
  }
  return MakeMap(gemm.b, gemm.inputs, gemm.rows, 1, &launch->map_b);
}

}  // namespace
}  // namespace sm90

namespace {

// An empty operand has no tensor map: what is left of y is zeros.
bool IsEmpty(const Gemm& gemm) { return gemm.rows == 0 || gemm.outputs == 0 || gemm.inputs == 0; }

cudaError_t Zero(const Gemm& gemm, int64_t elements, cudaStream_t stream) {
  return cudaMemsetAsync(gemm.y, 0, elements * (gemm.y_is_fp32 ? 4 : 2), stream);
}

}  // namespace

cudaError_t GemmForward(const Gemm& gemm, cudaStream_t stream) {
  using namespace sm90;
  if (IsEmpty(gemm)) return Zero(gemm, gemm.rows * gemm.outputs, stream);
  Launch launch;
  if (cudaError_t error = MakeForward(gemm, stream, &launch); error != cudaSuccess) return error;
  return gemm.y_is_fp32 ? Run<Major::K, Major::K, false, float>(launch)
                        : Run<Major::K, Major::K, false, __nv_bfloat16>(launch);
}

cudaError_t GemmInputGradient(const Gemm& gemm, cudaStream_t stream) {
  using namespace sm90;
  if (IsEmpty(gemm)) return Zero(gemm, gemm.rows * gemm.inputs, stream);
  Launch launch;
  if (cudaError_t error = MakeInputGradient(gemm, stream, &launch); error != cudaSuccess) {
    return error;
  }
  return gemm.y_is_fp32 ? Run<Major::K, Major::MN, false, float>(launch)
                        : Run<Major::K, Major::MN, false, __nv_bfloat16>(launch);
}

cudaError_t GemmWeightGradient(const Gemm& gemm, cudaStream_t stream) {
  using namespace sm90;
  if (IsEmpty(gemm)) return Zero(gemm, gemm.groups * gemm.outputs * gemm.inputs, stream);
  Launch launch;
  if (cudaError_t error = MakeWeightGradient(gemm, stream, &launch); error != cudaSuccess) {
    return error;
  }
  return gemm.y_is_fp32 ? Run<Major::MN, Major::MN, true, float>(launch)
                        : Run<Major::MN, Major::MN, true, __nv_bfloat16>(launch);
}

}  // namespace jaxfp4::cuda
