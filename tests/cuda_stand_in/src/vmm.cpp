// Virtual memory management (cuMem*): what torch's expandable segments are made of. An address range
// is reserved once; physical memory is created, mapped into it piece by piece, and taken out again.
// Memory counts as used from its creation to its release, mapped or not (CUDA Driver API, "Virtual
// Memory Management").

#include "state.h"

#include <sys/mman.h>

#include <cstring>

using namespace stand_in;

namespace {

constexpr size_t kGranularity = size_t(2) << 20;

struct Physical {
  size_t size;
  int device;
};

struct Range {
  void* mapped;  // begins below the range, which is aligned
  size_t mapped_size;
};

std::map<CUdeviceptr, Range>& ranges() {
  static auto* all = new std::map<CUdeviceptr, Range>;
  return *all;
}

Physical* physical(CUmemGenericAllocationHandle handle) { return reinterpret_cast<Physical*>(handle); }

void* pages(void* address, size_t size, int protection, int fixed) {
  return mmap(address, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
}

}  // namespace

EXPORT CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                              CUmemAllocationGranularity_flags) {
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t, CUdeviceptr, unsigned long long) {
  Lock lock(state().mutex);
  if (entered("cuMemAddressReserve") != cudaSuccess) return CUDA_ERROR_OUT_OF_MEMORY;
  void* memory = pages(nullptr, size + kGranularity, PROT_NONE, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  size_t address = (reinterpret_cast<size_t>(memory) + kGranularity - 1) / kGranularity * kGranularity;
  *pointer = static_cast<CUdeviceptr>(address);
  ranges()[*pointer] = {memory, size + kGranularity};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t) {
  Lock lock(state().mutex);
  entered("cuMemAddressFree");
  auto found = ranges().find(pointer);
  if (found == ranges().end()) return CUDA_ERROR_INVALID_VALUE;
  munmap(found->second.mapped, found->second.mapped_size);
  ranges().erase(found);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                            unsigned long long) {
  Lock lock(state().mutex);
  State& s = state();
  int device = properties->location.id;
  if (entered("cuMemCreate") != cudaSuccess || s.used[device] + size > s.memory_limit) return CUDA_ERROR_OUT_OF_MEMORY;
  s.used[device] += size;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{size, device});
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Lock lock(state().mutex);
  entered("cuMemRelease");
  state().used[physical(handle)->device] -= physical(handle)->size;
  delete physical(handle);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t, CUmemGenericAllocationHandle handle,
                         unsigned long long) {
  Lock lock(state().mutex);
  if (entered("cuMemMap") != cudaSuccess) return CUDA_ERROR_OUT_OF_MEMORY;
  auto* memory = reinterpret_cast<char*>(pointer);
  if (size != physical(handle)->size || mprotect(memory, size, PROT_READ | PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
  if (size <= state().poison_limit) memset(memory, kFresh, size);
  state().blocks[memory] = {size, Block::kDevice, physical(handle)->device};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

// A device fails where unmapped memory is used. Here that reads the pattern of freed memory, so that
// a test sees a wrong number instead of the end of its process.
EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  Lock lock(state().mutex);
  entered("cuMemUnmap");
  auto* memory = reinterpret_cast<char*>(pointer);
  if (!state().blocks.erase(memory)) return CUDA_ERROR_INVALID_VALUE;
  bool poisoned = size <= state().poison_limit;
  pages(memory, size, poisoned ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_FIXED);
  if (poisoned) memset(memory, kFreed, size);
  return CUDA_SUCCESS;
}
