// CUDA virtual memory management. Chunks can be exported as POSIX file descriptors where the driver can; libcuda is loaded at run time.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>

#include "cuda_api.h"
#include "driver.h"

namespace tasuki {
namespace {

using namespace cuda;

struct DeviceState {
  Context context = nullptr;
  Stream copy_stream = nullptr;
  AllocationProp prop{};
};

bool is_fd_limit_reached() {
  int probe = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
  if (probe >= 0) close(probe);
  return probe < 0 && errno == EMFILE;
}

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(const Functions& functions) : cu_(functions) {}

  const char* name() const override { return "cuda"; }

  Status granularity(int device, size_t* bytes) override {
    Scope scope(*this, device);
    if (!scope.status.ok()) return scope.status;
    return check("cuMemGetAllocationGranularity", cu_.granularity(bytes, &scope.state->prop, kGranularityMinimum));
  }

  Status room(int device, size_t* free_bytes, size_t* total_bytes) override {
    Scope scope(*this, device);
    if (!scope.status.ok()) return scope.status;
    return check("cuMemGetInfo", cu_.memory_info(free_bytes, total_bytes));
  }

  Status reserve(int device, size_t bytes, uintptr_t* address) override {
    Scope scope(*this, device);
    if (!scope.status.ok()) return scope.status;
    Address start = 0;
    Status status = check("cuMemAddressReserve", cu_.address_reserve(&start, bytes, 0, 0, 0));
    *address = static_cast<uintptr_t>(start);
    return status;
  }

  Status unreserve(uintptr_t address, size_t bytes) override { return check("cuMemAddressFree", cu_.address_free(address, bytes)); }

  Status create(int device, size_t bytes, Physical* chunk) override {
    Scope scope(*this, device);
    if (!scope.status.ok()) return scope.status;
    AllocationHandle handle = 0;
    Status status = check("cuMemCreate", cu_.create(&handle, bytes, &scope.state->prop, 0));
    if (!status.ok()) return status;
    *chunk = named(handle);
    return {};
  }

  Status release(Physical chunk) override {
    Status status = check("cuMemRelease", cu_.release(handle_of(chunk)));
    if (!status.ok()) return status;
    std::lock_guard<std::mutex> lock(mutex_);
    handles_.erase(chunk);
    return {};
  }

  // CUDA has no read-only descriptors; the importer requests read-only access, and the driver then refuses writes.
  Status export_fd(Physical chunk, Access, int* fd) override {
    Result result = cu_.export_handle(fd, handle_of(chunk), kHandlePosixFd, 0);
    return check_fd("cuMemExportToShareableHandle", result);
  }

  Status import_fd(int device, int fd, size_t, Access, Physical* chunk) override {
    Scope scope(*this, device);
    if (!scope.status.ok()) return scope.status;
    AllocationHandle handle = 0;
    Result result = cu_.import_handle(&handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)), kHandlePosixFd);
    if (result == kInvalidValue) return failure(Code::bad_handle, "not a descriptor of CUDA memory");
    Status status = check_fd("cuMemImportFromShareableHandle", result);
    if (!status.ok()) return status;
    *chunk = named(handle);
    return {};
  }

  Status map(uintptr_t address, size_t bytes, Physical chunk) override {
    Relaxed relaxed(cu_);
    return check("cuMemMap", cu_.map(address, bytes, 0, handle_of(chunk), 0));
  }

  Status allow(uintptr_t address, size_t bytes, int device, Access access) override {
    Scope scope(*this, device);
    if (!scope.status.ok()) return scope.status;
    AccessDesc desc{{kLocationDevice, device}, access == Access::read_only ? kProtRead : kProtReadWrite};
    return check("cuMemSetAccess", cu_.set_access(address, bytes, &desc, 1));
  }

  Status unmap(uintptr_t address, size_t bytes) override { return check("cuMemUnmap", cu_.unmap(address, bytes)); }

  Status synchronize(int device) override {
    Scope scope(*this, device);
    if (!scope.status.ok()) return scope.status;
    return check("cuCtxSynchronize", cu_.context_synchronize());
  }

  Status pin(int device, size_t bytes, void** host) override {
    Scope scope(*this, device);
    if (!scope.status.ok()) return scope.status;
    return check("cuMemHostAlloc", cu_.host_alloc(host, bytes, kHostPortable));
  }

  Status unpin(int device, void* host, size_t) override {
    Scope scope(*this, device);
    if (!scope.status.ok()) return scope.status;
    return check("cuMemFreeHost", cu_.host_free(host));
  }

  Status copy_to_host(int device, void* host, uintptr_t address, size_t bytes) override {
    Scope scope(*this, device);
    if (!scope.status.ok()) return scope.status;
    return check("cuMemcpyDtoHAsync", cu_.copy_to_host(host, address, bytes, scope.state->copy_stream));
  }

  Status copy_from_host(int device, uintptr_t address, const void* host, size_t bytes) override {
    Scope scope(*this, device);
    if (!scope.status.ok()) return scope.status;
    return check("cuMemcpyHtoDAsync", cu_.copy_from_host(address, host, bytes, scope.state->copy_stream));
  }

  Status mark(int device, Event* event) override {
    Scope scope(*this, device);
    if (!scope.status.ok()) return scope.status;
    CudaEvent made = nullptr;
    Status status = check("cuEventCreate", cu_.event_create(&made, kEventDisableTiming));
    if (!status.ok()) return status;
    status = check("cuEventRecord", cu_.event_record(made, scope.state->copy_stream));
    if (!status.ok()) return cu_.event_destroy(made), status;
    *event = reinterpret_cast<Event>(made);
    return {};
  }

  Status wait(int device, Event event) override {
    Scope scope(*this, device);
    if (!scope.status.ok() || event == 0) return scope.status;
    return check("cuEventSynchronize", cu_.event_synchronize(reinterpret_cast<CudaEvent>(event)));
  }

  Status stream_after(int device, uintptr_t stream, Event event) override {
    Scope scope(*this, device);
    if (!scope.status.ok() || event == 0) return scope.status;
    return check("cuStreamWaitEvent", cu_.stream_wait_event(reinterpret_cast<Stream>(stream), reinterpret_cast<CudaEvent>(event), 0));
  }

  void forget(int device, Event event) override {
    Scope scope(*this, device);
    if (scope.status.ok() && event != 0) cu_.event_destroy(reinterpret_cast<CudaEvent>(event));
  }

 private:
  // Memory may be allocated during graph capture: calls that map pages are not captured.
  struct Relaxed {
    explicit Relaxed(const Functions& functions) : cu(functions) { cu.exchange_capture_mode(&mode); }
    ~Relaxed() { cu.exchange_capture_mode(&mode); }
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;

    const Functions& cu;
    int mode = kCaptureRelaxed;  // then holds the previous mode
  };

  // Makes the device's primary context, shared with torch, current for one call.
  struct Scope {
    Scope(CudaDriver& owner, int device) : relaxed(owner.cu_), driver(owner) {
      status = driver.state_of(device, &state);
      if (status.ok()) status = driver.check("cuCtxPushCurrent", driver.cu_.context_push(state->context));
      is_pushed = status.ok();
    }
    ~Scope() {
      Context previous = nullptr;
      if (is_pushed) driver.cu_.context_pop(&previous);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    Relaxed relaxed;
    CudaDriver& driver;
    DeviceState* state = nullptr;
    Status status;
    bool is_pushed = false;
  };

  Status state_of(int device, DeviceState** state) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = devices_.find(device);
    if (found != devices_.end()) return *state = &found->second, Status{};
    DeviceState made;
    Status status = set_up(device, &made);
    if (!status.ok()) return status;
    *state = &(devices_[device] = made);
    return {};
  }

  Status set_up(int device, DeviceState* state) {
    DeviceId id = 0;
    Status status = check("cuDeviceGet", cu_.device_get(&id, device));
    int has_vmm = 0, has_fd = 0, has_rdma = 0;
    if (status.ok()) status = check("cuDeviceGetAttribute", cu_.device_attribute(&has_vmm, kAttributeVmm, id));
    if (status.ok()) status = check("cuDeviceGetAttribute", cu_.device_attribute(&has_fd, kAttributePosixFd, id));
    if (status.ok()) status = check("cuDeviceGetAttribute", cu_.device_attribute(&has_rdma, kAttributeRdmaVmm, id));
    if (!status.ok()) return status;
    if (has_vmm == 0) return failure(Code::unavailable, "cuda:" + std::to_string(device) + " lacks virtual memory management");
    state->prop.type = kAllocationPinned;
    state->prop.requested_handle_types = has_fd != 0 ? kHandlePosixFd : 0;
    state->prop.location = {kLocationDevice, device};
    state->prop.alloc_flags.gpu_direct_rdma_capable = has_rdma != 0 ? 1 : 0;
    status = check("cuDevicePrimaryCtxRetain", cu_.context_retain(&state->context, id));
    if (status.ok()) status = check("cuCtxPushCurrent", cu_.context_push(state->context));
    if (!status.ok()) return status;
    status = check("cuStreamCreate", cu_.stream_create(&state->copy_stream, kStreamNonBlocking));
    if (status.ok()) try_exportable(&state->prop);
    Context previous = nullptr;
    cu_.context_pop(&previous);
    return status;
  }

  // Some drivers, as in virtual machines, announce descriptors but create no memory that has them. Without room it stays open: the first
  // arena will fail.
  void try_exportable(AllocationProp* prop) {
    size_t bytes = 0;
    if (prop->requested_handle_types == 0 || cu_.granularity(&bytes, prop, kGranularityMinimum) != kSuccess) return;
    AllocationHandle handle = 0;
    Result result = cu_.create(&handle, bytes, prop, 0);
    if (result == kSuccess) {
      cu_.release(handle);
    } else if (result != kOutOfMemory) {
      prop->requested_handle_types = 0;
    }
  }

  // A handle may be 0, and imported handles may repeat, so chunks get our own ids.
  Physical named(AllocationHandle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    handles_[++last_name_] = handle;
    return last_name_;
  }

  AllocationHandle handle_of(Physical chunk) {
    std::lock_guard<std::mutex> lock(mutex_);
    return handles_.at(chunk);
  }

  Status check(const char* call, Result result) const {
    if (result == kSuccess) return {};
    const char *symbol = nullptr, *text = nullptr;
    cu_.get_error_name(result, &symbol);
    cu_.get_error_string(result, &text);
    std::string message = std::string(call) + ": " + (symbol != nullptr ? symbol : std::to_string(result).c_str());
    if (text != nullptr) message += std::string(" (") + text + ")";
    return failure(result == kOutOfMemory ? Code::out_of_memory : Code::driver, message);
  }

  Status check_fd(const char* call, Result result) const {
    Status status = check(call, result);
    if (status.ok() || !is_fd_limit_reached()) return status;
    return failure(Code::fd_limit, status.message + "; raise the limit of open files (ulimit -n) or use larger chunks");
  }

  Functions cu_;
  std::mutex mutex_;
  std::map<int, DeviceState> devices_;
  std::map<Physical, AllocationHandle> handles_;
  Physical last_name_ = 0;
};

}  // namespace

Status open_cuda_driver(const char* path, std::unique_ptr<Driver>* driver) {
  void* library = dlopen(path != nullptr ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return failure(Code::unavailable, std::string("no CUDA driver on this machine: ") + dlerror());
  Functions functions;
#define TASUKI_LOAD(field, symbol, parameters)                                                      \
  functions.field = reinterpret_cast<Result(*) parameters>(dlsym(library, symbol));                 \
  if (functions.field == nullptr) return failure(Code::unavailable, std::string("libcuda lacks ") + symbol);
  TASUKI_CUDA_FUNCTIONS(TASUKI_LOAD)
#undef TASUKI_LOAD
  Result result = functions.init(0);
  if (result != kSuccess) return failure(Code::unavailable, "cuInit failed with CUDA error " + std::to_string(result));
  *driver = std::make_unique<CudaDriver>(functions);
  return {};
}

}  // namespace tasuki
