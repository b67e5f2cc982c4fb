// Called by torch's CUDAPluggableAllocator. One allocation function per slot, so that a MemPool's memory lands in its tag's arena from
// any thread or graph capture; nothing here depends on thread state.
#include <sys/types.h>

#include <cstdio>

#include "process.h"
#include "tasuki_memory.h"

namespace tasuki {
namespace {

std::atomic<uint64_t> arena_of[TASUKI_NUM_SLOTS][TASUKI_NUM_DEVICES];

void log_failure(const char* event, const void* address, uint64_t bytes) {
  std::fprintf(stderr, "event=%s address=%p bytes=%llu cause=\"%s\"\n", event, address, static_cast<unsigned long long>(bytes),
               tasuki_last_error());
}

// Null tells torch that there is no memory: it empties its cache, retries once and raises OutOfMemoryError.
void* allocate_in_slot(int slot, ssize_t bytes, int device) noexcept {
  if (bytes <= 0 || device < 0 || device >= TASUKI_NUM_DEVICES) return nullptr;
  void* address = nullptr;
  int code = tasuki_allocate(arena_of[slot][device], static_cast<uint64_t>(bytes), &address);
  if (code == TASUKI_OK) return address;
  log_failure("torch_alloc_failed", nullptr, static_cast<uint64_t>(bytes));
  return nullptr;
}

}  // namespace
}  // namespace tasuki

int tasuki_bind_slot(int slot, int device, uint64_t arena) {
  if (slot < 0 || slot >= TASUKI_NUM_SLOTS || device < 0 || device >= TASUKI_NUM_DEVICES) {
    return tasuki::report(tasuki::failure(tasuki::Code::bad_argument, "slot, device: out of range"));
  }
  tasuki::arena_of[slot][device] = arena;
  return TASUKI_OK;
}

#pragma GCC visibility push(default)
extern "C" {

#define TASUKI_SLOT(slot)                                                         \
  void* tasuki_torch_alloc_##slot(ssize_t bytes, int device, void* /*stream*/) {  \
    return tasuki::allocate_in_slot(slot, bytes, device);                         \
  }
TASUKI_SLOT(0)
TASUKI_SLOT(1)
TASUKI_SLOT(2)
TASUKI_SLOT(3)
TASUKI_SLOT(4)
TASUKI_SLOT(5)
TASUKI_SLOT(6)
TASUKI_SLOT(7)
#undef TASUKI_SLOT

void tasuki_torch_free(void* address, ssize_t bytes, int /*device*/, void* /*stream*/) {
  if (address == nullptr || tasuki_free(address) == TASUKI_OK) return;
  ++tasuki::process().num_refused_frees;
  tasuki::log_failure("torch_free_refused", address, static_cast<uint64_t>(bytes));
}

}  // extern "C"
#pragma GCC visibility pop
