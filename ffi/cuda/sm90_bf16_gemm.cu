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
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
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
  const CUresult result = encode(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<uint16_t*>(data), sizes, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

struct Launch {
  CUtensorMap map_a, map_b;
  GemmParams params;
  int64_t row_tiles;  // an upper bound, of kTileRows
  cudaStream_t stream;
};

template <int kColumns, Major kMajorA, Major kMajorB, Share kShare, bool kRaggedDepth, class Y>
cudaError_t Run(Launch launch) {
  constexpr int kCluster = kShare == Share::kNothing ? 1 : 2;
  constexpr int kSharedBytes = sizeof(SharedMemory<kColumns>) + 1024;
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");
  const auto kernel = GemmGlobal<kColumns, kMajorA, kMajorB, kShare, kRaggedDepth, Y>;
  int processors;
  if (cudaError_t error = MultiprocessorCount(&processors); error != cudaSuccess) return error;
  if (cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  const int64_t column_tiles = (launch.params.columns + kColumns - 1) / kColumns;
  launch.params.column_tiles =
      static_cast<int>(kShare == Share::kA ? (column_tiles + 1) / 2 : column_tiles);
  const int64_t blocks = std::min<int64_t>(processors / kCluster * kCluster,
                                           (launch.row_tiles + 1) * (column_tiles + 1));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::max<int64_t>(blocks / kCluster * kCluster, kCluster)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
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
                    gemm.outputs,
                    0};
  launch->row_tiles = (gemm.rows + kTileRows - 1) / kTileRows + gemm.groups;
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
                    gemm.inputs,
                    0};
  launch->row_tiles = (gemm.rows + kTileRows - 1) / kTileRows + gemm.groups;
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
                    gemm.inputs,
                    0};
  launch->row_tiles = (gemm.outputs + kTileRows - 1) / kTileRows * gemm.groups;
  launch->stream = stream;
  if (cudaError_t error = MakeMap(gemm.a, gemm.outputs, gemm.rows, 1, &launch->map_a);
      error != cudaSuccess) {
    return error;
  }
  return MakeMap(gemm.b, gemm.inputs, gemm.rows, 1, &launch->map_b);
}

}  // namespace
}  // namespace sm90
}  // namespace jaxfp4::cuda
