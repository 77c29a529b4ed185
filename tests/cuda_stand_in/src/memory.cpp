// Devices and memory. Memory of a device is host memory, poisoned when it is allocated and freed.

#include "state.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

using namespace stand_in;

namespace {

void* reserve(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

// CUDA Programming Guide, "Stream Capture: Prohibited and Unhandled Operations": cudaMalloc is
// potentially unsafe in a capture, for it may be implemented by a call that synchronizes.
cudaError_t allocate(void** pointer, size_t size, Block::Kind kind, const char* call) {
  State& s = state();
  *pointer = nullptr;
  if (prohibited(call)) return failed(cudaErrorStreamCaptureUnsupported, call);
  int device = current_device();
  bool on_device = kind == Block::kDevice;
  if (on_device && s.used[device] + size > s.memory_limit) return failed(cudaErrorMemoryAllocation, call);
  size = std::max<size_t>(size, 1);
  void* memory = reserve(size);
  if (!memory) return failed(cudaErrorMemoryAllocation, call);
  if (on_device) s.used[device] += size;
  if (size <= s.poison_limit) memset(memory, kFresh, size);
  s.blocks[static_cast<char*>(memory)] = {size, kind, device};
  *pointer = memory;
  return cudaSuccess;
}

// cudaFree waits for work that uses the memory. Here the memory waits: it is unmapped by work that
// follows all that was submitted. The caller may hold the allocator's lock, and a body that runs may
// need Python's interpreter lock, whose holder may wait for the allocator.
cudaError_t release(void* pointer, const char* call) {
  State& s = state();
  if (!pointer) return cudaSuccess;
  if (prohibited(call)) return failed(cudaErrorStreamCaptureUnsupported, call);
  auto found = s.blocks.find(static_cast<char*>(pointer));
  if (found == s.blocks.end() || found->second.freed) return failed(cudaErrorInvalidValue, call);
  found->second.freed = true;
  Block block = found->second;
  if (block.kind == Block::kDevice) s.used[block.device] -= block.size;
  bool poisoned = block.size <= s.poison_limit;
  submit_last(block.device, [=] {
    Lock lock(state().mutex);
    state().blocks.erase(static_cast<char*>(pointer));
    if (poisoned) memset(pointer, kFreed, block.size);
    munmap(pointer, block.size);
  });
  return cudaSuccess;
}

// Pageable memory is staged when a copy is submitted; pinned memory is read when the copy runs.
cudaError_t copy(Lock& lock, void* to, const void* from, size_t size, Stream* stream) {
  NodeFacts facts;
  facts.type = CU_GRAPH_NODE_TYPE_MEMCPY;
  facts.to = to, facts.from = from, facts.bytes = size;
  bool pageable = kind_of(from) == Block::kUnknown;
  if (pageable || kind_of(to) == Block::kUnknown) state().calls["pageable"]++;
  if (pageable && !stream->capture) {
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                      static_cast<const char*>(from) + size);
    return submit(stream, "memcpy", [=] { memmove(to, staged->data(), size); });
  }
  cudaError_t status = submit(stream, "memcpy", [=] { memmove(to, from, size); }, facts);
  bool to_pageable = kind_of(to) == Block::kUnknown;
  if (status == cudaSuccess && to_pageable && !stream->capture) finish(lock, stream->last);
  return status;
}

}  // namespace

namespace stand_in {

std::map<char*, Block>::iterator block_of(const void* pointer) {
  auto& blocks = state().blocks;
  auto* address = static_cast<char*>(const_cast<void*>(pointer));
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return blocks.end();
  auto found = std::prev(after);
  return address < found->first + found->second.size ? found : blocks.end();
}

Block::Kind kind_of(const void* pointer) {
  auto found = block_of(pointer);
  return found == state().blocks.end() ? Block::kUnknown : found->second.kind;
}

}  // namespace stand_in

// ---- devices

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = state().num_devices;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= state().num_devices) return failed(cudaErrorInvalidDevice, "cudaSetDevice");
  current_device() = device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

// The limits of an H100 (CUDA Programming Guide, "Compute Capabilities", 9.0).
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "stand-in for a device of capability 9.0");
  p->major = 9;
  p->minor = 0;
  p->totalGlobalMem = state().memory_limit;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->totalConstMem = 65536;
  p->l2CacheSize = 50 << 20;
  p->textureAlignment = 512;
  p->concurrentKernels = 1;
  p->unifiedAddressing = 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[2]; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

// Programming Guide, "Prohibited and Unhandled Operations": it is invalid to synchronize a device
// or context while one of its streams is capturing.
EXPORT cudaError_t cudaDeviceSynchronize() {
  ENTER(cudaDeviceSynchronize);
  int device = current_device();
  if (meets_capture(device)) return failed(cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
  finish_device(lock, device);
  return state().broken == cudaSuccess ? cudaSuccess : failed(state().broken, "cudaDeviceSynchronize");
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ENTER(cudaMemGetInfo);
  *total = state().memory_limit;
  const size_t used = state().used[current_device()];
  *free = *total > used ? *total - used : 0;  // a test lowered the limit
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetLastError() { return last_error(true); }
EXPORT cudaError_t cudaPeekAtLastError() { return last_error(false); }

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported by the stand-in";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureMerge: return "operation would result in a merge of separate capture sequences";
    case cudaErrorStreamCaptureUnmatched: return "capture was not ended in the same stream as it began";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorStreamCaptureWrongThread: return "attempt to terminate a thread-local capture sequence from another thread";
    default: {
      static thread_local char text[32];
      snprintf(text, sizeof text, "CUDA error %d", error);
      return text;
    }
  }
}

EXPORT const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- allocation

EXPORT cudaError_t cudaMalloc(void** pointer, size_t size) {
  ENTER(cudaMalloc);
  return allocate(pointer, size, Block::kDevice, "cudaMalloc");
}

EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  ENTER(cudaHostAlloc);
  return allocate(pointer, size, Block::kPinned, "cudaHostAlloc");
}

EXPORT cudaError_t cudaMallocHost(void** pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }

EXPORT cudaError_t cudaFree(void* pointer) {
  ENTER(cudaFree);
  return release(pointer, "cudaFree");
}

EXPORT cudaError_t cudaFreeHost(void* pointer) {
  ENTER(cudaFreeHost);
  return release(pointer, "cudaFreeHost");
}

EXPORT cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  ENTER(cudaHostRegister);
  state().blocks[static_cast<char*>(pointer)] = {size, Block::kPinned, current_device()};
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  ENTER(cudaHostUnregister);
  state().blocks.erase(static_cast<char*>(pointer));
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  ENTER(cudaPointerGetAttributes);
  memset(attributes, 0, sizeof *attributes);
  auto found = block_of(pointer);
  if (found == state().blocks.end()) {
    attributes->type = cudaMemoryTypeUnregistered;
    return cudaSuccess;
  }
  bool pinned = found->second.kind == Block::kPinned;
  attributes->type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->hostPointer = pinned ? const_cast<void*>(pointer) : nullptr;
  attributes->device = found->second.device;
  return cudaSuccess;
}

// ---- copies

EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  ENTER(cudaMemcpyAsync);
  return copy(lock, to, from, size, stream_of(stream));
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  ENTER(cudaMemcpyPeerAsync);
  return copy(lock, to, from, size, stream_of(stream));
}

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  ENTER(cudaMemcpy);
  if (prohibited("cudaMemcpy")) return failed(cudaErrorStreamCaptureUnsupported, "cudaMemcpy");
  Stream* stream = stream_of(nullptr);
  cudaError_t status = copy(lock, to, from, size, stream);
  if (status == cudaSuccess) finish(lock, stream->last);
  return status;
}

EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind, cudaStream_t stream) {
  ENTER(cudaMemcpy2DAsync);
  return submit(stream_of(stream), "memcpy2D", [=] {
    for (size_t row = 0; row < height; row++)
      memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  });
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;  // a constant of a kernel, and kernels do not run
}

EXPORT cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char symbol[1 << 16];
  *pointer = symbol;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  ENTER(cudaMemsetAsync);
  NodeFacts facts;
  facts.type = CU_GRAPH_NODE_TYPE_MEMSET;
  facts.to = pointer, facts.bytes = size;
  return submit(stream_of(stream), "memset", [=] { memset(pointer, value, size); }, facts);
}

EXPORT cudaError_t cudaMemset(void* pointer, int value, size_t size) {
  ENTER(cudaMemset);
  if (prohibited("cudaMemset")) return failed(cudaErrorStreamCaptureUnsupported, "cudaMemset");
  return submit(stream_of(nullptr), "memset", [=] { memset(pointer, value, size); });
}
