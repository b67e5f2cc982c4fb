// Segments that torch takes with cudaMalloc: in an arena once redirected, in the runtime before and on other devices.
#include "../tasuki_memory.h"
#include "check.h"

extern "C" {
int tasuki_redirect_cudart(int device, uint64_t arena, const char* library, int (*allocate)(uint64_t, uint64_t, void**),
                           int (*release)(void*));
int cudaMalloc(void** address, size_t bytes);
int cudaFree(void* address);
void fake_cudart_use(int device);
int fake_cudart_taken();
int fake_cudart_freed();
int fake_library_take(void** address, size_t bytes);
}

namespace {

constexpr uint64_t kMiB = 1 << 20;

uint64_t mapped_bytes(uint64_t arena) {
  tasuki_usage usage{};
  CHECK(tasuki_get_usage(arena, &usage) == TASUKI_OK);
  return usage.mapped_bytes;
}

}  // namespace

TEST(torch_takes_its_segments_from_an_arena_once_redirected) {
  void *early = nullptr, *first = nullptr, *second = nullptr, *elsewhere = nullptr, *shared = nullptr;
  CHECK(cudaMalloc(&early, kMiB) == 0 && fake_cudart_taken() == 1);

  tasuki_arena_options options{16 * kMiB, 2 * kMiB, 2 * kMiB};
  uint64_t arena = 0;
  CHECK(tasuki_create_arena(TASUKI_HOST, "torch", 0, &options, &arena) == TASUKI_OK);
  CHECK(tasuki_redirect_cudart(-1, arena, "preload_test", tasuki_allocate, tasuki_free) != 0);
  CHECK(tasuki_redirect_cudart(0, arena, "preload_test", tasuki_allocate, tasuki_free) == 0);
  CHECK(tasuki_redirect_cudart(0, arena, "another", tasuki_allocate, tasuki_free) != 0);

  CHECK(cudaMalloc(&first, 2 * kMiB) == 0 && cudaMalloc(&second, 2 * kMiB) == 0);
  CHECK(fake_cudart_taken() == 1 && mapped_bytes(arena) == 4 * kMiB);
  CHECK(cudaFree(first) == 0 && mapped_bytes(arena) == 2 * kMiB);
  CHECK(cudaMalloc(&first, 64 * kMiB) == 2);  // cudaErrorMemoryAllocation: torch then empties its cache and tries again

  // Another library shares its memory by handles of the runtime.
  CHECK(fake_library_take(&shared, kMiB) == 0 && fake_cudart_taken() == 2 && mapped_bytes(arena) == 2 * kMiB);
  CHECK(cudaFree(shared) == 0 && fake_cudart_freed() == 1);

  fake_cudart_use(1);
  CHECK(cudaMalloc(&elsewhere, kMiB) == 0 && fake_cudart_taken() == 3);
  CHECK(cudaFree(elsewhere) == 0 && cudaFree(early) == 0 && fake_cudart_freed() == 3);
  CHECK(cudaFree(nullptr) == 0 && fake_cudart_freed() == 4);
  CHECK(cudaFree(second) == 0 && mapped_bytes(arena) == 0 && fake_cudart_freed() == 4);
}
