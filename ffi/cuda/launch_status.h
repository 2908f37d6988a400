// The result of a launch as a handler returns it.
#ifndef JAXFP4_CUDA_LAUNCH_STATUS_H_
#define JAXFP4_CUDA_LAUNCH_STATUS_H_

#include <cuda_runtime_api.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxfp4::cuda {

inline ::xla::ffi::Error LaunchStatus(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return ::xla::ffi::Error::Success();
  return ::xla::ffi::Error::Internal(std::string(call) + ": " + cudaGetErrorString(error));
}

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_LAUNCH_STATUS_H_
