// Which output tile a block of a persistent grouped product works on.
//
// Tiles are numbered through the groups in order; a block takes every gridDim.x-th. No size is
// known on the host: a warp walks the group sizes itself, 32 at a time, with a prefix sum over its
// lanes, and only ever forward, so a launch reads them once. A group's rows are cut into slabs and
// these into tiles of nearly equal height, which keeps the blocks' shares even.
#ifndef JAXFP4_CUDA_TILE_SCHEDULE_CUH_
#define JAXFP4_CUDA_TILE_SCHEDULE_CUH_

#include <cstdint>

namespace jaxfp4::cuda {

struct OutputTile {
  int group;
  int64_t first_row;  // of the group, in the matrix of all groups' rows
  int64_t rows;       // of the group
  int first_slab, slabs;
  int column_tile;
};

class TileSchedule {
 public:
  // A group has ceil(rows / slab_rows) slabs, or fixed_slabs if that is not 0, and tiles of at most
  // max_slabs.
  __device__ TileSchedule(const int32_t* group_sizes, int groups, int64_t rows, int slab_rows,
                          int max_slabs, int fixed_slabs, int column_tiles)
      : group_sizes_(group_sizes),
        groups_(groups),
        rows_(rows),
        slab_rows_(slab_rows),
        max_slabs_(max_slabs),
        fixed_slabs_(fixed_slabs),
        column_tiles_(column_tiles) {
    LoadGroups();
  }

  // The tile of this number; false past the last. Numbers must not fall. All lanes of a warp call.
  __device__ bool Find(int64_t number, OutputTile& tile) {
    while (number >= base_tile_ + Last(tile_prefix_)) {
      if (base_group_ + 32 >= groups_) return false;
      base_tile_ += Last(tile_prefix_);
      base_row_ += Last(row_prefix_);
      base_group_ += 32;
      LoadGroups();
    }
    const unsigned past = __ballot_sync(0xFFFFFFFFu, number < base_tile_ + tile_prefix_);
    const int lane = __ffs(past) - 1;
    const int64_t size = __shfl_sync(0xFFFFFFFFu, size_, lane);
    const int64_t row_end = __shfl_sync(0xFFFFFFFFu, row_prefix_, lane);
    const int64_t tile_end = __shfl_sync(0xFFFFFFFFu, tile_prefix_, lane);
    const int slabs = Slabs(size), row_tiles = RowTiles(slabs);
    tile.group = base_group_ + lane;
    tile.rows = size;
    tile.first_row = base_row_ + row_end - size;
    const int index = static_cast<int>(
        number - (base_tile_ + tile_end - static_cast<int64_t>(row_tiles) * column_tiles_));
    // Down a panel of tile rows first: blocks at work together share rows of a and columns of b.
    const int panel = index / (kPanel * column_tiles_);
    const int panel_rows = min(kPanel, row_tiles - panel * kPanel);
    const int within = index - panel * kPanel * column_tiles_;
    const int row_tile = panel * kPanel + within % panel_rows;
    tile.column_tile = within / panel_rows;
    const int height = slabs / row_tiles, taller = slabs % row_tiles;
    tile.first_slab = row_tile * height + min(row_tile, taller);
    tile.slabs = height + (row_tile < taller ? 1 : 0);
    return true;
  }

  // Rows of all groups. Leaves the schedule at its end.
  __device__ int64_t UsedRows() {
    while (base_group_ + 32 < groups_) {
      base_row_ += Last(row_prefix_);
      base_group_ += 32;
      LoadGroups();
    }
    return base_row_ + Last(row_prefix_);
  }

 private:
  static constexpr int kPanel = 16;

  __device__ int Slabs(int64_t size) const {
    return fixed_slabs_ != 0 ? fixed_slabs_
                             : static_cast<int>((size + slab_rows_ - 1) / slab_rows_);
  }

  __device__ int RowTiles(int slabs) const { return (slabs + max_slabs_ - 1) / max_slabs_; }

  __device__ static int64_t Last(int64_t prefix) { return __shfl_sync(0xFFFFFFFFu, prefix, 31); }

  // This lane's group of the 32 from base_group_, and the prefix sums with it.
  __device__ void LoadGroups() {
    const int lane = threadIdx.x % 32;
    const int group = base_group_ + lane;
    const bool exists = group < groups_;
    size_ = !exists ? 0 : group_sizes_ == nullptr ? rows_ : max(0, group_sizes_[group]);
    row_prefix_ = InclusiveSum(size_, lane);
    // Sizes that are not legal end at the last row.
    const int64_t left = max(int64_t{0}, rows_ - base_row_);
    const int64_t end = min(row_prefix_, left), start = min(row_prefix_ - size_, left);
    size_ = end - start;
    row_prefix_ = end;
    tile_prefix_ = InclusiveSum(
        exists ? static_cast<int64_t>(RowTiles(Slabs(size_))) * column_tiles_ : 0, lane);
  }

  __device__ static int64_t InclusiveSum(int64_t value, int lane) {
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t other = __shfl_up_sync(0xFFFFFFFFu, value, distance);
      if (lane >= distance) value += other;
    }
    return value;
  }

  const int32_t* group_sizes_;
  int groups_;
  int64_t rows_;
  int slab_rows_, max_slabs_, fixed_slabs_, column_tiles_;
  int base_group_ = 0;
  int64_t base_tile_ = 0, base_row_ = 0;
  int64_t size_ = 0, row_prefix_ = 0, tile_prefix_ = 0;  // this lane's group
};

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_TILE_SCHEDULE_CUH_
