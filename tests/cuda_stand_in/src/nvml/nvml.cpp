// libnvidia-ml.so.1: torch loads it with the driver's functions for expandable segments, and asks it
// for links between devices and for the processes of one. Here nothing is known of a device but that it
// is there (NVML_ERROR_NOT_SUPPORTED).

#define NVML(name, status) \
  extern "C" __attribute__((visibility("default"))) int name() { return status; }

NVML(nvmlInit_v2, 0)
NVML(nvmlDeviceGetGpuFabricInfoV, 3)
NVML(nvmlDeviceGetHandleByPciBusId_v2, 0)
NVML(nvmlDeviceGetNvLinkRemoteDeviceType, 3)
NVML(nvmlDeviceGetNvLinkRemotePciInfo_v2, 3)
NVML(nvmlSystemGetCudaDriverVersion_v2, 3)

extern "C" __attribute__((visibility("default"))) int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}
