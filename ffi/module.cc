// The compiled module jaxfp4._custom_calls: registrations() maps a platform to its custom calls.
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "ffi/handlers.h"

namespace py = pybind11;

namespace {

py::dict Registrations() {
  py::dict platforms;
  py::dict cpu;
#define JAXFP4_ADD(name) \
  cpu["jaxfp4_" #name] = py::capsule(reinterpret_cast<void*>(jaxfp4_cpu_##name));
  JAXFP4_FOR_EACH_HANDLER(JAXFP4_ADD)
#undef JAXFP4_ADD
  platforms["cpu"] = cpu;
#ifdef JAXFP4_CUDA
  py::dict cuda;
#define JAXFP4_ADD(name) \
  cuda["jaxfp4_" #name] = py::capsule(reinterpret_cast<void*>(jaxfp4_cuda_##name));
  JAXFP4_FOR_EACH_CUDA_HANDLER(JAXFP4_ADD)
#undef JAXFP4_ADD
  platforms["cuda"] = cuda;
#endif
  return platforms;
}

void CheckInstructionSet() {
#if defined(__x86_64__) && defined(__AVX2__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    throw std::runtime_error(
        "jaxfp4 was built for x86-64-v3 and this CPU lacks AVX2 or FMA; build it from source with "
        "-Ccmake.define.JAXFP4_CPU_ARCH=x86-64");
  }
#endif
}

}  // namespace

PYBIND11_MODULE(_custom_calls, module) {
  CheckInstructionSet();
  module.doc() = "XLA custom calls of jaxfp4.";
  module.def("registrations", &Registrations,
             "A dict from platform name to a dict from target name to a PyCapsule of its handler.");
}
