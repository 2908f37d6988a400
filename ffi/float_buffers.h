// Buffers that hold either bf16 or fp32: how a handler picks its kernel's type.
#ifndef JAXFP4_FLOAT_BUFFERS_H_
#define JAXFP4_FLOAT_BUFFERS_H_

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxfp4 {

// Calls run(T()) with T = uint16_t for bf16 and T = float for f32.
template <class Run>
::xla::ffi::Error ForFloatType(::xla::ffi::DataType type, const char* name, const Run& run) {
  namespace ffi = ::xla::ffi;
  switch (type) {
    case ffi::BF16:
      run(uint16_t());
      return ffi::Error::Success();
    case ffi::F32:
      run(float());
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument(std::string(name) + " must be bf16 or f32");
  }
}

template <class T>
const T* FloatData(const ::xla::ffi::AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

template <class T>
T* FloatData(::xla::ffi::Result<::xla::ffi::AnyBuffer>& buffer) {
  return static_cast<T*>(buffer->untyped_data());
}

}  // namespace jaxfp4

#endif  // JAXFP4_FLOAT_BUFFERS_H_
