// Kernel launches. No kernel runs: each is submitted as work without a body, so that order, capture
// rules and graphs are real. Values come from Python, as host functions (see values.py).

#include "state.h"

#include <cstring>

using namespace stand_in;

namespace {

cudaError_t launch(const void* function, dim3 grid, dim3 block, cudaStream_t stream) {
  auto found = state().kernels.find(function);
  std::string name = found == state().kernels.end() ? "kernel" : found->second;
  NodeFacts facts;
  facts.function = function;
  facts.grid = grid, facts.block = block;
  return submit(stream_of(stream), name, nullptr, std::move(facts));
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

// `kernel<<<grid, block, shared, stream>>>(…)` pushes these and pops them again in its stub.
thread_local std::vector<Configuration> configurations;

}  // namespace

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                   int*) {
  Lock lock(state().mutex);
  state().kernels[host] = name;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Configuration top = configurations.back();
  configurations.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *static_cast<cudaStream_t*>(stream) = top.stream;
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  ENTER(cudaLaunchKernel);
  return launch(function, grid, block, stream);
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  ENTER(cudaLaunchKernel);
  return launch(kernel, grid, block, stream);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t,
                                                cudaStream_t stream) {
  ENTER(cudaLaunchKernel);
  return launch(function, grid, block, stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  ENTER(cudaLaunchKernel);
  return launch(function, config->gridDim, config->blockDim, config->stream);
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                          unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
