// Preloaded into a process on a pool: what torch takes from the CUDA runtime for itself then comes from an arena too.
// Depends on nothing but libc, since LD_PRELOAD loads it into every program that the process starts.
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2;  // cudaError_t
constexpr int kNumDevices = 16;

using Allocate = int (*)(uint64_t arena, uint64_t bytes, void** address);
using Free = int (*)(void* address);

std::atomic<Allocate> allocate{nullptr};
std::atomic<Free> release{nullptr};
std::atomic<const char*> redirected{nullptr};
std::atomic<uint64_t> arena_of[kNumDevices];

// The runtime is loaded long after this library.
template <typename Function>
Function* runtime(const char* symbol) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, symbol));
}

// Whether an address is code of the redirected library. cudaMalloc is rare, so the search costs nothing that counts.
bool is_redirected(const void* caller) {
  Dl_info info{};
  const char* library = redirected;
  if (library == nullptr || dladdr(caller, &info) == 0 || info.dli_fname == nullptr) return false;
  const char* name = std::strrchr(info.dli_fname, '/');
  return std::strcmp(name == nullptr ? info.dli_fname : name + 1, library) == 0;
}

uint64_t current_arena() {
  auto* get_device = runtime<int(int*)>("cudaGetDevice");
  int device = -1;
  bool is_known = get_device != nullptr && get_device(&device) == kSuccess && device >= 0 && device < kNumDevices;
  return is_known ? arena_of[device].load() : 0;
}

}  // namespace

extern "C" {

// From now on cudaMalloc on this device allocates in the arena if `library`, a file name, calls it. The functions are those of
// tasuki_memory.h.
__attribute__((visibility("default"))) int tasuki_redirect_cudart(int device, uint64_t arena, const char* library,
                                                                  Allocate allocate_in, Free free_in) {
  if (device < 0 || device >= kNumDevices || library == nullptr) return kInvalidValue;
  if (const char* before = redirected; before != nullptr && std::strcmp(before, library) != 0) return kInvalidValue;
  if (redirected == nullptr) redirected = strdup(library);
  allocate = allocate_in;
  release = free_in;
  arena_of[device] = arena;
  return kSuccess;
}

__attribute__((visibility("default"))) int cudaMalloc(void** address, size_t bytes) {
  uint64_t arena = is_redirected(__builtin_return_address(0)) ? current_arena() : 0;
  if (arena != 0 && bytes != 0) return allocate.load()(arena, bytes, address) == 0 ? kSuccess : kOutOfMemory;
  auto* next = runtime<int(void**, size_t)>("cudaMalloc");
  return next != nullptr ? next(address, bytes) : kOutOfMemory;
}

// Memory from before the redirection is the runtime's.
__attribute__((visibility("default"))) int cudaFree(void* address) {
  Free ours = release;
  if (address != nullptr && ours != nullptr && ours(address) == 0) return kSuccess;
  auto* next = runtime<int(void*)>("cudaFree");
  return next != nullptr ? next(address) : kInvalidValue;
}

}  // extern "C"
