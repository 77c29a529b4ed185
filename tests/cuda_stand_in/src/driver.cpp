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

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned, CUstream stream, void**, void**) {
  return as_driver(cudaLaunchKernel(function, {x, y, z}, {block_x, block_y, block_z}, nullptr, 0, stream));
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void**, void**) {
  return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, 0,
                        c->hStream, nullptr, nullptr);
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

// ---- nodes of graphs. A kernel of a library is told as a kernel, one of a module as a function; the
// node itself stands for the kernel that a host function computes.

EXPORT CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode* before, CUgraphEdgeData*, size_t* count) {
  return as_driver(cudaGraphNodeGetDependencies(node, before, nullptr, count));
}

EXPORT CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  *type = reinterpret_cast<GraphNode*>(node)->facts.type;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS_v2* out) {
  auto* node = reinterpret_cast<GraphNode*>(handle);
  NodeFacts& facts = node->facts;
  if (facts.type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
  *out = {nullptr,       facts.grid.x,  facts.grid.y,  facts.grid.z, facts.block.x, facts.block.y,
          facts.block.z, 0, node->addresses.data(), nullptr, nullptr, nullptr};
  if (facts.function)
    out->func = static_cast<CUfunction>(const_cast<void*>(facts.function));
  else
    out->kern = reinterpret_cast<CUkernel>(node);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphMemcpyNodeGetParams(CUgraphNode handle, CUDA_MEMCPY3D* out) {
  NodeFacts& facts = reinterpret_cast<GraphNode*>(handle)->facts;
  if (facts.type != CU_GRAPH_NODE_TYPE_MEMCPY) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state().mutex);
  auto place = [](const void* at) { return kind_of(at) == Block::kDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; };
  *out = {};
  if ((out->srcMemoryType = place(facts.from)) == CU_MEMORYTYPE_HOST) out->srcHost = facts.from;
  else out->srcDevice = reinterpret_cast<CUdeviceptr>(facts.from);
  if ((out->dstMemoryType = place(facts.to)) == CU_MEMORYTYPE_HOST) out->dstHost = const_cast<void*>(facts.to);
  else out->dstDevice = reinterpret_cast<CUdeviceptr>(facts.to);
  out->WidthInBytes = facts.bytes, out->Height = out->Depth = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphMemsetNodeGetParams(CUgraphNode handle, CUDA_MEMSET_NODE_PARAMS* out) {
  NodeFacts& facts = reinterpret_cast<GraphNode*>(handle)->facts;
  if (facts.type != CU_GRAPH_NODE_TYPE_MEMSET) return CUDA_ERROR_INVALID_VALUE;
  *out = {reinterpret_cast<CUdeviceptr>(facts.to), 0, 0, 1, facts.bytes, 1};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetName(const char** name, CUfunction function) {
  Lock lock(state().mutex);
  auto found = state().kernels.find(function);
  if (found == state().kernels.end()) return CUDA_ERROR_INVALID_HANDLE;
  *name = found->second.c_str();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetName(const char** name, CUkernel kernel) {
  *name = reinterpret_cast<GraphNode*>(kernel)->name.c_str();
  return CUDA_SUCCESS;
}

// No image of a kernel is loaded, which has the layout.
EXPORT CUresult cuFuncGetParamInfo(CUfunction, size_t, size_t*, size_t*) { return CUDA_ERROR_NOT_SUPPORTED; }

EXPORT CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size) {
  auto& parameters = reinterpret_cast<GraphNode*>(kernel)->facts.parameters;
  if (index >= parameters.size()) return CUDA_ERROR_INVALID_VALUE;
  *size = parameters[index].size();
  *offset = 0;
  for (size_t i = 0; i < index; i++) *offset += (parameters[i].size() + 7) / 8 * 8;
  return CUDA_SUCCESS;
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
