// What is computed from a row of x before it is quantised.
#ifndef JAXFP4_FRONT_H_
#define JAXFP4_FRONT_H_

#include <cstdint>

namespace jaxfp4 {

// The values are the attribute's.
enum class Front : int64_t {
  kNone = 0,     // x [K]
  kSwiGlu = 1,   // x [2K], gate first
  kRmsNorm = 2,  // x [K] and a weight [K]
};

}  // namespace jaxfp4

#endif  // JAXFP4_FRONT_H_
