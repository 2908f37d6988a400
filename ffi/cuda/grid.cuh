// Cutting a matrix of rows and packs over a grid: for ops without a sum along the row.
#ifndef JAXFP4_CUDA_GRID_CUH_
#define JAXFP4_CUDA_GRID_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxfp4::cuda {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// blockIdx.x and threadIdx.y count rows, blockIdx.y and threadIdx.x packs along a row. Blocks have
// `threads` threads or a few less, and nearly all of them have work whatever the width.
struct PackGrid {
  dim3 blocks, threads;

  PackGrid(int64_t rows, int64_t packs_per_row, int64_t threads_wanted) {
    const int64_t tiles = CeilDiv(packs_per_row, threads_wanted);
    const int64_t x = CeilDiv(packs_per_row, tiles);
    threads = dim3(static_cast<unsigned>(x), static_cast<unsigned>(threads_wanted / x));
    blocks = dim3(static_cast<unsigned>(CeilDiv(rows, threads.y)), static_cast<unsigned>(tiles));
  }
};

// This thread's row and first column on such a grid.
template <int kCount>
struct PackPlace {
  int64_t row, column;

  __device__ __forceinline__ PackPlace()
      : row(static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y),
        column((static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kCount) {}
};

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_GRID_CUH_
