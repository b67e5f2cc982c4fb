// A libcuda of memfd and mmap with the symbols that driver_cuda.cpp loads, so that its calls run where there is no GPU.
// It checks arguments as the real one does: granularity, whole mappings, a current context, access before use.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "cuda_api.h"

using namespace tasuki::cuda;

namespace {

constexpr size_t kGranularity = size_t{2} << 20;

struct Handle {
  int fd;
  size_t bytes;
  ino_t file;
  bool is_imported = false;
  int num_references = 1;
};

ino_t file_of(int fd) {
  struct stat file;
  return fstat(fd, &file) == 0 ? file.st_ino : 0;
}

std::map<AllocationHandle, Handle> handles;
std::map<std::string, int> failures;  // symbol -> result
AllocationHandle last_handle = 0;
size_t total_bytes = size_t{1} << 30;
size_t used_bytes = 0;
AllocationProp last_prop;
bool exports_none = false;
int context_depth = 0, num_synchronizations = 0, num_events = 0;
char context_object, stream_object;

Result outcome(const char* symbol) {
  auto found = failures.find(symbol);
  if (found == failures.end()) return kSuccess;
  Result result = found->second;
  failures.erase(found);
  return result;
}

bool is_aligned(size_t number) { return number % kGranularity == 0 && number != 0; }

Result no_access(Address address, size_t bytes, bool is_fixed, void** start) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (is_fixed ? MAP_FIXED : 0);
  *start = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, flags, -1, 0);
  return *start == MAP_FAILED ? kOutOfMemory : kSuccess;
}

}  // namespace

#define START(symbol)                                       \
  if (Result injected = outcome(symbol); injected != kSuccess) return injected
#define NEEDS_CONTEXT \
  if (context_depth == 0) return 201

extern "C" {

// For the tests.
void fake_cuda_fail(const char* symbol, int result) { failures[symbol] = result; }
void fake_cuda_set_total(size_t bytes) { total_bytes = bytes; }
void fake_cuda_export_none(bool value) { exports_none = value; }
size_t fake_cuda_used() { return used_bytes; }
int fake_cuda_synchronizations() { return num_synchronizations; }
int fake_cuda_depth() { return context_depth; }
int fake_cuda_events() { return num_events; }
const AllocationProp* fake_cuda_prop() { return &last_prop; }

Result cuInit(unsigned) { return outcome("cuInit"); }
Result cuGetErrorName(Result, const char** name) { return *name = "CUDA_ERROR_FAKE", kSuccess; }
Result cuGetErrorString(Result, const char** text) { return *text = "made up", kSuccess; }
Result cuDeviceGet(DeviceId* id, int device) {
  START("cuDeviceGet");
  if (device > 1) return 101;
  return *id = device, kSuccess;
}
Result cuDeviceGetAttribute(int* value, int attribute, DeviceId) {
  START("cuDeviceGetAttribute");
  return *value = attribute == kAttributeVmm || attribute == kAttributePosixFd ? 1 : 0, kSuccess;
}
Result cuDevicePrimaryCtxRetain(Context* context, DeviceId) {
  START("cuDevicePrimaryCtxRetain");
  return *context = reinterpret_cast<Context>(&context_object), kSuccess;
}
Result cuCtxPushCurrent_v2(Context) { return ++context_depth, kSuccess; }
Result cuCtxPopCurrent_v2(Context*) { return --context_depth, kSuccess; }
Result cuCtxSynchronize() {
  NEEDS_CONTEXT;
  START("cuCtxSynchronize");
  return ++num_synchronizations, kSuccess;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) {
  static int current = 0;
  std::swap(*mode, current);
  return kSuccess;
}
Result cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  NEEDS_CONTEXT;
  *free_bytes = total_bytes - used_bytes;
  *total = total_bytes;
  return outcome("cuMemGetInfo");
}
Result cuMemAddressReserve(Address* address, size_t bytes, size_t, Address, unsigned long long) {
  START("cuMemAddressReserve");
  if (!is_aligned(bytes)) return kInvalidValue;
  void* start = nullptr;
  Result result = no_access(0, bytes + kGranularity, false, &start);
  *address = (reinterpret_cast<Address>(start) + kGranularity - 1) / kGranularity * kGranularity;
  return result;
}
Result cuMemAddressFree(Address address, size_t bytes) {
  START("cuMemAddressFree");
  return munmap(reinterpret_cast<void*>(address), bytes) == 0 ? kSuccess : kInvalidValue;
}
Result cuMemGetAllocationGranularity(size_t* bytes, const AllocationProp* prop, int) {
  START("cuMemGetAllocationGranularity");
  if (prop->type != kAllocationPinned || prop->location.type != kLocationDevice) return kInvalidValue;
  return *bytes = kGranularity, kSuccess;
}
Result cuMemCreate(AllocationHandle* handle, size_t bytes, const AllocationProp* prop, unsigned long long) {
  START("cuMemCreate");
  if (!is_aligned(bytes)) return kInvalidValue;
  if (exports_none && prop->requested_handle_types != 0) return 801;
  if (used_bytes + bytes > total_bytes) return kOutOfMemory;
  int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kOperatingSystem;
  last_prop = *prop;
  used_bytes += bytes;
  handles[*handle = ++last_handle] = {fd, bytes, file_of(fd)};
  return kSuccess;
}
Result cuMemRelease(AllocationHandle handle) {
  START("cuMemRelease");
  auto found = handles.find(handle);
  if (found == handles.end()) return kInvalidValue;
  if (--found->second.num_references > 0) return kSuccess;
  close(found->second.fd);
  used_bytes -= found->second.bytes;
  handles.erase(found);
  return kSuccess;
}
Result cuMemMap(Address address, size_t bytes, size_t, AllocationHandle handle, unsigned long long) {
  START("cuMemMap");
  auto found = handles.find(handle);
  if (found == handles.end() || found->second.bytes != bytes || address % kGranularity != 0) return kInvalidValue;
  void* got = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd, 0);
  return got == MAP_FAILED ? kInvalidValue : kSuccess;
}
Result cuMemUnmap(Address address, size_t bytes) {
  START("cuMemUnmap");
  void* start = nullptr;
  return no_access(address, bytes, true, &start);
}
Result cuMemSetAccess(Address address, size_t bytes, const AccessDesc* desc, size_t count) {
  START("cuMemSetAccess");
  if (count != 1 || desc->location.type != kLocationDevice) return kInvalidValue;
  int protection = desc->flags == kProtReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  return mprotect(reinterpret_cast<void*>(address), bytes, protection) == 0 ? kSuccess : kInvalidValue;
}
Result cuMemExportToShareableHandle(void* fd, AllocationHandle handle, int type, unsigned long long) {
  START("cuMemExportToShareableHandle");
  if (exports_none) return kInvalidValue;
  if (type != kHandlePosixFd || handles.count(handle) == 0 || handles[handle].is_imported) return kInvalidValue;
  int got = fcntl(handles[handle].fd, F_DUPFD_CLOEXEC, 0);
  std::memcpy(fd, &got, sizeof got);
  return got < 0 ? kOperatingSystem : kSuccess;
}
Result cuMemImportFromShareableHandle(AllocationHandle* handle, void* fd, int type) {
  START("cuMemImportFromShareableHandle");
  struct stat file;
  int number = static_cast<int>(reinterpret_cast<intptr_t>(fd));
  if (type != kHandlePosixFd || fstat(number, &file) != 0 || fcntl(number, F_GET_SEALS) < 0) return kInvalidValue;
  for (auto& [known, of] : handles) {
    if (of.file == file.st_ino) return ++of.num_references, *handle = known, kSuccess;
  }
  int own = fcntl(number, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return kOperatingSystem;
  handles[*handle = ++last_handle] = {own, static_cast<size_t>(file.st_size), file.st_ino, true};
  used_bytes += static_cast<size_t>(file.st_size);
  return kSuccess;
}
Result cuMemHostAlloc(void** host, size_t bytes, unsigned) {
  NEEDS_CONTEXT;
  START("cuMemHostAlloc");
  *host = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return kSuccess;
}
Result cuMemFreeHost(void*) { return outcome("cuMemFreeHost"); }
Result cuStreamCreate(Stream* stream, unsigned flags) {
  NEEDS_CONTEXT;
  START("cuStreamCreate");
  if (flags != kStreamNonBlocking) return kInvalidValue;
  return *stream = reinterpret_cast<Stream>(&stream_object), kSuccess;
}
Result cuStreamWaitEvent(Stream, CudaEvent, unsigned) { return outcome("cuStreamWaitEvent"); }
Result cuEventCreate(CudaEvent* event, unsigned) {
  NEEDS_CONTEXT;
  START("cuEventCreate");
  ++num_events;
  return *event = reinterpret_cast<CudaEvent>(&num_events), kSuccess;
}
Result cuEventRecord(CudaEvent, Stream) { return outcome("cuEventRecord"); }
Result cuEventSynchronize(CudaEvent) { return outcome("cuEventSynchronize"); }
Result cuEventDestroy_v2(CudaEvent) { return --num_events, kSuccess; }
Result cuMemcpyDtoHAsync_v2(void* host, Address address, size_t bytes, Stream) {
  START("cuMemcpyDtoHAsync");
  return std::memcpy(host, reinterpret_cast<const void*>(address), bytes), kSuccess;
}
Result cuMemcpyHtoDAsync_v2(Address address, const void* host, size_t bytes, Stream) {
  START("cuMemcpyHtoDAsync");
  return std::memcpy(reinterpret_cast<void*>(address), host, bytes), kSuccess;
}

}  // extern "C"
