// What is asked of a device at every launch, kept by device.
#ifndef JAXFP4_CUDA_DEVICE_H_
#define JAXFP4_CUDA_DEVICE_H_

#include <cuda_runtime_api.h>

#include <atomic>

namespace jaxfp4::cuda {

// The multiprocessors of the calling thread's device.
inline cudaError_t MultiprocessorCount(int* count) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices] = {};
  int device;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (device < kDevices) *count = known[device].load(std::memory_order_relaxed);
  if (device < kDevices && *count != 0) return cudaSuccess;
  if (cudaError_t error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  if (device < kDevices) known[device].store(*count, std::memory_order_relaxed);
  return cudaSuccess;
}

}  // namespace jaxfp4::cuda

#endif  // JAXFP4_CUDA_DEVICE_H_
