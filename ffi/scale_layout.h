// Where a block's scale stands in the tensor-core layout of NVFP4 block scales.
//
// Tiles of 128 rows x 4 blocks, 512 bytes each, row-major over tiles; within a tile the row's
// low five bits stride by 16, its next two bits by 4 and the block by 1. Rows are padded to a
// multiple of 128 and blocks to a multiple of 4 with zeros. The layout is an inner matter of the
// Blackwell kernels: at every public boundary and on disk block scales are linear [rows, K/16].
#ifndef JAXFP4_SCALE_LAYOUT_H_
#define JAXFP4_SCALE_LAYOUT_H_

#include <cstdint>

#include "ffi/numerics.h"

namespace jaxfp4 {

constexpr int64_t kScaleTileRows = 128;
constexpr int64_t kScaleTileBlocks = 4;

// Bytes of the tiled scales of a matrix of `rows` x `blocks` block scales.
JAXFP4_INLINE int64_t TiledScaleBytes(int64_t rows, int64_t blocks) {
  const int64_t row_tiles = (rows + kScaleTileRows - 1) / kScaleTileRows;
  const int64_t block_tiles = (blocks + kScaleTileBlocks - 1) / kScaleTileBlocks;
  return row_tiles * block_tiles * kScaleTileRows * kScaleTileBlocks;
}

// Byte offset of block scale (row, block) in a matrix of `blocks` block scales a row.
JAXFP4_INLINE int64_t TiledScaleOffset(int64_t row, int64_t block, int64_t blocks) {
  const int64_t block_tiles = (blocks + kScaleTileBlocks - 1) / kScaleTileBlocks;
  const int64_t tile = (row / kScaleTileRows) * block_tiles + block / kScaleTileBlocks;
  return tile * (kScaleTileRows * kScaleTileBlocks) + (row % 32) * 16 +
         ((row % kScaleTileRows) / 32) * 4 + block % kScaleTileBlocks;
}

}  // namespace jaxfp4

#endif  // JAXFP4_SCALE_LAYOUT_H_
