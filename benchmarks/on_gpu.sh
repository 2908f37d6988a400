#!/usr/bin/env bash
# Builds the module with its CUDA kernels for this machine's GPU and runs the tests that need one.
#
#   benchmarks/on_gpu.sh [ARCHITECTURE] [PYTEST ARGUMENTS...]     90a (Hopper) by default
#
# Needs nvcc, CMake, Ninja and a Python with jax for CUDA, pybind11, pytest and nvidia-cutlass.
set -euo pipefail
cd "$(dirname "$0")/.."
architecture="${1:-90a}"
shift || true
cmake -G Ninja -S . -B build/gpu -DPython_EXECUTABLE="$(command -v python3)" \
  -Dpybind11_DIR="$(python3 -m pybind11 --cmakedir)" -DJAXFP4_CUDA_ARCHS="$architecture" > /dev/null
cmake --build build/gpu
XLA_PYTHON_CLIENT_PREALLOCATE=false python3 -m pytest -m gpu "$@"
