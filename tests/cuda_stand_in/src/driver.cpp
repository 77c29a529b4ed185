// The driver's entry points that torch, Triton and AOTInductor's libraries call: one context a
// device, modules whose kernels are launched without a body.

#include "state.h"

#include <dlfcn.h>

#include <cstring>

using namespace stand_in;

static CUresult as_driver(cudaError_t error) { return static_cast<CUresult>(error); }
static CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<intptr_t>(0x1000 + device)); }

// ---- devices and contexts

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) { return as_driver(cudaDriverGetVersion(version)); }
EXPORT CUresult cuDeviceGetCount(int* count) { return as_driver(cudaGetDeviceCount(count)); }

EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return as_driver(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_of(current_device());
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) { return context ? cuCtxGetCurrent(context) : CUDA_SUCCESS; }

EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1024;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }

// ---- modules and launches

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = reinterpret_cast<CUmodule>(new char);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}

EXPORT CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }

EXPORT CUresult cuModuleUnload(CUmodule module) {
  delete reinterpret_cast<char*>(module);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  Lock lock(state().mutex);
  auto* made = new std::string(name);
  state().kernels[made] = *made;
  *function = reinterpret_cast<CUfunction>(made);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                : 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               unsigned, CUstream stream, void**, void**) {
  return as_driver(cudaLaunchKernel(function, {}, {}, nullptr, 0, stream));
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  return as_driver(cudaLaunchKernel(function, {}, {}, nullptr, 0, config->hStream));
}

EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}

// ---- memory and graphs

EXPORT CUresult cuMemsetD32Async(CUdeviceptr pointer, unsigned value, size_t count, CUstream stream) {
  Lock lock(state().mutex);
  return as_driver(submit(stream_of(stream), "memset", [=] {
    for (size_t i = 0; i < count; i++) reinterpret_cast<unsigned*>(pointer)[i] = value;
  }));
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr pointer) {
  Lock lock(state().mutex);
  auto found = block_of(reinterpret_cast<void*>(pointer));
  if (found == state().blocks.end()) return CUDA_ERROR_INVALID_VALUE;
  *base = reinterpret_cast<CUdeviceptr>(found->first);
  *size = found->second.size;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  Lock lock(state().mutex);
  if (kind_of(reinterpret_cast<void*>(pointer)) == Block::kUnknown) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *static_cast<CUdeviceptr*>(value) = pointer;
  else
    *static_cast<int*>(value) = CU_MEMORYTYPE_DEVICE;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                           const CUgraphNode** after, size_t* count) {
  return as_driver(cudaStreamGetCaptureInfo(stream, reinterpret_cast<cudaStreamCaptureStatus*>(status),
                                            reinterpret_cast<unsigned long long*>(id), graph, after, nullptr, count));
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return as_driver(cudaStreamIsCapturing(stream, reinterpret_cast<cudaStreamCaptureStatus*>(status)));
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  return as_driver(cudaStreamCreateWithPriority(stream, flags, priority));
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream) { return as_driver(cudaStreamDestroy(stream)); }

EXPORT CUresult cuStreamSynchronize(CUstream stream) { return as_driver(cudaStreamSynchronize(stream)); }

EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  return as_driver(cudaGraphGetNodes(graph, nodes, count));
}

EXPORT CUresult cuGraphUpload(CUgraphExec executable, CUstream) {
  Lock lock(state().mutex);
  if (cudaError_t fault = entered("cuGraphUpload")) return as_driver(fault);
  return uploaded(reinterpret_cast<Graph*>(executable)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// Graphs of one topology; what their nodes do may differ.
EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec handle, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
  Lock lock(state().mutex);
  auto* executable = reinterpret_cast<Graph*>(handle);
  auto* source = reinterpret_cast<Graph*>(graph);
  auto edges = [](Graph* of) {
    std::map<GraphNode*, size_t> position;
    for (auto& node : of->nodes) position.emplace(node.get(), position.size());
    std::vector<std::vector<size_t>> found;
    for (auto& node : of->nodes) {
      found.emplace_back();
      for (auto* before : node->after) found.back().push_back(position[before]);
    }
    return found;
  };
  bool same = edges(executable) == edges(source);
  if (info) *info = {same ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, nullptr, nullptr};
  if (!same) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  executable->nodes = source->nodes;
  return CUDA_SUCCESS;
}

// ---- look-up by name

static CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  static void* self = dlopen("libcudart.so.13", RTLD_LAZY);
  *function = dlsym(self, (std::string(name) + "_v2").c_str());
  if (!*function) *function = dlsym(self, name);
  if (!*function) *function = reinterpret_cast<void*>(unsupported);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

EXPORT CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t,
                                    CUdriverProcAddressQueryResult* result) {
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return as_driver(cudaGetDriverEntryPointByVersion(name, function, 0, 0, nullptr));
}
