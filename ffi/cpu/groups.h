// Reading group_sizes: the rows of each group, checked.
#ifndef JAXFP4_CPU_GROUPS_H_
#define JAXFP4_CPU_GROUPS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxfp4::cpu {

// Group g has rows [starts[g], starts[g + 1]); starts.back() rows are used in all.
struct Groups {
  std::vector<int64_t> starts{0};
  int64_t count() const { return static_cast<int64_t>(starts.size()) - 1; }
  int64_t used_rows() const { return starts.back(); }
  int64_t rows(int64_t group) const { return starts[group + 1] - starts[group]; }
};

// Of s32 [G]. No groups where it is absent.
inline ::xla::ffi::ErrorOr<Groups> ReadGroups(const ::xla::ffi::AnyBuffer& group_sizes,
                                              int64_t rows) {
  Groups groups;
  for (int64_t g = 0; g < static_cast<int64_t>(group_sizes.element_count()); ++g) {
    const int64_t size = group_sizes.typed_data<int32_t>()[g];
    if (size < 0) {
      return ::xla::ffi::Unexpected(
          ::xla::ffi::Error::InvalidArgument("group_sizes[" + std::to_string(g) + "] is " +
                                             std::to_string(size) + "; sizes must be 0 or more"));
    }
    groups.starts.push_back(groups.starts.back() + size);
  }
  if (groups.used_rows() > rows) {
    return ::xla::ffi::Unexpected(::xla::ffi::Error::InvalidArgument(
        "group_sizes add up to " + std::to_string(groups.used_rows()) + ", more than the " +
        std::to_string(rows) + " rows"));
  }
  return groups;
}

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_GROUPS_H_
