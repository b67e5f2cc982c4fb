// The part of the CUDA driver API that driver_cuda.cpp calls, declared here so that building needs no CUDA toolkit.
// tests/cuda_layout_test.cpp compares it with cuda.h where one is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tasuki::cuda {

using Result = int;
using DeviceId = int;
using Context = struct ContextOpaque*;
using Stream = struct StreamOpaque*;
using CudaEvent = struct EventOpaque*;
using Address = unsigned long long;
using AllocationHandle = unsigned long long;

constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kOperatingSystem = 304;
constexpr int kLocationDevice = 1, kAllocationPinned = 1, kHandlePosixFd = 1;
constexpr int kProtRead = 1, kProtReadWrite = 3;
constexpr int kAttributeVmm = 102, kAttributePosixFd = 103, kAttributeRdmaVmm = 110;
constexpr int kGranularityMinimum = 0, kCaptureRelaxed = 2;
constexpr unsigned kHostPortable = 1, kStreamNonBlocking = 1, kEventDisableTiming = 2;

struct Location {
  int type;
  int id;
};

struct AllocationProp {
  int type;
  int requested_handle_types;
  Location location;
  void* win32_handle_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } alloc_flags;
};

struct AccessDesc {
  Location location;
  int flags;
};

// One field per function: X(field, symbol in libcuda, parameters).
#define TASUKI_CUDA_FUNCTIONS(X)                                                                       \
  X(init, "cuInit", (unsigned))                                                                        \
  X(get_error_name, "cuGetErrorName", (Result, const char**))                                          \
  X(get_error_string, "cuGetErrorString", (Result, const char**))                                      \
  X(device_get, "cuDeviceGet", (DeviceId*, int))                                                       \
  X(device_attribute, "cuDeviceGetAttribute", (int*, int, DeviceId))                                   \
  X(context_retain, "cuDevicePrimaryCtxRetain", (Context*, DeviceId))                                  \
  X(context_push, "cuCtxPushCurrent_v2", (Context))                                                    \
  X(context_pop, "cuCtxPopCurrent_v2", (Context*))                                                     \
  X(context_synchronize, "cuCtxSynchronize", ())                                                       \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int*))                                \
  X(memory_info, "cuMemGetInfo_v2", (size_t*, size_t*))                                                \
  X(address_reserve, "cuMemAddressReserve", (Address*, size_t, size_t, Address, unsigned long long))   \
  X(address_free, "cuMemAddressFree", (Address, size_t))                                               \
  X(granularity, "cuMemGetAllocationGranularity", (size_t*, const AllocationProp*, int))               \
  X(create, "cuMemCreate", (AllocationHandle*, size_t, const AllocationProp*, unsigned long long))     \
  X(release, "cuMemRelease", (AllocationHandle))                                                       \
  X(map, "cuMemMap", (Address, size_t, size_t, AllocationHandle, unsigned long long))                  \
  X(unmap, "cuMemUnmap", (Address, size_t))                                                            \
  X(set_access, "cuMemSetAccess", (Address, size_t, const AccessDesc*, size_t))                        \
  X(export_handle, "cuMemExportToShareableHandle", (void*, AllocationHandle, int, unsigned long long)) \
  X(import_handle, "cuMemImportFromShareableHandle", (AllocationHandle*, void*, int))                  \
  X(host_alloc, "cuMemHostAlloc", (void**, size_t, unsigned))                                          \
  X(host_free, "cuMemFreeHost", (void*))                                                               \
  X(stream_create, "cuStreamCreate", (Stream*, unsigned))                                              \
  X(stream_wait_event, "cuStreamWaitEvent", (Stream, CudaEvent, unsigned))                             \
  X(event_create, "cuEventCreate", (CudaEvent*, unsigned))                                             \
  X(event_record, "cuEventRecord", (CudaEvent, Stream))                                                \
  X(event_synchronize, "cuEventSynchronize", (CudaEvent))                                              \
  X(event_destroy, "cuEventDestroy_v2", (CudaEvent))                                                   \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void*, Address, size_t, Stream))                            \
  X(copy_from_host, "cuMemcpyHtoDAsync_v2", (Address, const void*, size_t, Stream))

struct Functions {
#define TASUKI_FIELD(field, symbol, parameters) Result(*field) parameters = nullptr;
  TASUKI_CUDA_FUNCTIONS(TASUKI_FIELD)
#undef TASUKI_FIELD
};

}  // namespace tasuki::cuda
