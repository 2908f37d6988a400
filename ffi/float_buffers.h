// Buffers that hold either bf16 or fp32: how a handler picks its kernel's type.
#ifndef JAXFP4_FLOAT_BUFFERS_H_
#define JAXFP4_FLOAT_BUFFERS_H_

#include <cstdint>

#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfp4 {

// Returns run(T()), an Error, with T = uint16_t for bf16 and T = float for f32.
template <class Run>
::xla::ffi::Error ForFloatType(::xla::ffi::DataType type, const Run& run) {
  switch (type) {
    case ::xla::ffi::BF16:
      return run(uint16_t());
    case ::xla::ffi::F32:
      return run(float());
    default:
      return ::xla::ffi::Error::Internal("a buffer that is neither bf16 nor f32 was not refused");
  }
}

template <class T>
const T* FloatData(const AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

template <class T>
T* FloatData(AnyResult buffer) {
  return static_cast<T*>(buffer->untyped_data());
}

}  // namespace jaxfp4

#endif  // JAXFP4_FLOAT_BUFFERS_H_
