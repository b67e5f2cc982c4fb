// The CUDA driver's calls, against a libcuda made of memfd: codes, contexts, descriptors. The GPU itself is tests/gpu's business.
#include <dlfcn.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../cuda_api.h"
#include "../memory.h"
#include "../tasuki_memory.h"
#include "check.h"

using namespace tasuki;

namespace {

constexpr size_t kMiB = 1 << 20;

struct Fake {
  void* library = dlopen(FAKE_CUDA, RTLD_NOW);
  template <typename Function>
  Function* get(const char* symbol) {
    return reinterpret_cast<Function*>(dlsym(library, symbol));
  }
  void fail(const char* symbol, int result) { get<void(const char*, int)>("fake_cuda_fail")(symbol, result); }
  size_t used() { return get<size_t()>("fake_cuda_used")(); }
};

struct Setup {
  Fake fake;
  std::unique_ptr<Memory> memory = std::make_unique<Memory>();
  Setup() {
    std::unique_ptr<Driver> driver;
    CHECK_OK(open_cuda_driver(FAKE_CUDA, &driver));
    CHECK_OK(memory->set_driver(DriverKind::cuda, std::move(driver)));
  }
  ~Setup() {
    memory.reset();
    CHECK(fake.used() == 0 && fake.get<int()>("fake_cuda_depth")() == 0 && fake.get<int()>("fake_cuda_events")() == 0);
  }
  uint64_t arena(const char* tag) {
    uint64_t id = 0;
    CHECK_OK(memory->create_arena(DriverKind::cuda, tag, 0, {64 * kMiB, 2 * kMiB, 4 * kMiB}, &id));
    return id;
  }
};

}  // namespace

TEST(chunks_are_pinned_device_memory_that_can_be_exported) {
  Setup s;
  uintptr_t address = 0;
  CHECK_OK(s.memory->allocate(s.arena("weights"), 5 * kMiB, &address));
  const auto* prop = s.fake.get<const cuda::AllocationProp*()>("fake_cuda_prop")();
  CHECK(prop->requested_handle_types == cuda::kHandlePosixFd && prop->location.type == cuda::kLocationDevice);
  CHECK(s.fake.used() == 6 * kMiB && address % (2 * kMiB) == 0);
}

TEST(a_driver_that_exports_no_memory_creates_it_all_the_same) {
  Setup s;
  auto* export_none = s.fake.get<void(bool)>("fake_cuda_export_none");
  export_none(true);
  uint64_t arena = s.arena("weights"), id = 0;
  uintptr_t address = 0, base = 0;
  CHECK_OK(s.memory->allocate(arena, 5 * kMiB, &address));
  std::vector<SharedChunk> chunks;
  CHECK(s.memory->export_arena(arena, Access::read_only, 9, &chunks, &base, &id).code == Code::driver && chunks.empty());
  export_none(false);
}

TEST(content_goes_to_pinned_memory_and_back_after_a_synchronization) {
  Setup s;
  uint64_t arena = s.arena("weights"), bytes = 0;
  uintptr_t address = 0;
  CHECK_OK(s.memory->allocate(arena, 5 * kMiB, &address));
  auto* content = reinterpret_cast<unsigned char*>(address);
  content[0] = 3, content[5 * kMiB - 1] = 4;
  int before = s.fake.get<int()>("fake_cuda_synchronizations")();
  CHECK_OK(s.memory->set_policy(arena, {true, false}));
  CHECK_OK(s.memory->pause({arena}, &bytes));
  CHECK(bytes == 6 * kMiB && s.fake.used() == 0 && s.fake.get<int()>("fake_cuda_synchronizations")() > before);
  CHECK_OK(s.memory->resume({arena}, &bytes));
  CHECK(content[0] == 3 && content[5 * kMiB - 1] == 4);
}

TEST(driver_errors_name_the_call_and_out_of_memory_says_the_room) {
  Setup s;
  uint64_t arena = s.arena("weights"), bytes = 0;
  uintptr_t address = 0;
  CHECK_OK(s.memory->allocate(arena, 4 * kMiB, &address));
  CHECK_OK(s.memory->pause({arena}, &bytes));
  s.fake.fail("cuMemMap", 999);
  Status status = s.memory->resume({arena}, &bytes);
  CHECK(status.code == Code::driver && has(status.message, "cuMemMap: CUDA_ERROR_FAKE (made up)") && s.fake.used() == 0);
  s.fake.fail("cuMemCreate", cuda::kOutOfMemory);
  status = s.memory->resume({arena}, &bytes);
  CHECK(status.code == Code::out_of_memory && status.needed_bytes == 4 * kMiB && status.free_bytes == 1024 * kMiB);
  CHECK_OK(s.memory->resume({arena}, &bytes));
}

TEST(a_second_process_maps_the_descriptors_read_only) {
  Setup s;
  uint64_t arena = s.arena("weights"), id = 0, import = 0;
  uintptr_t address = 0, base = 0, there = 0;
  CHECK_OK(s.memory->allocate(arena, 5 * kMiB, &address));
  reinterpret_cast<unsigned char*>(address)[99] = 7;
  std::vector<SharedChunk> chunks;
  CHECK_OK(s.memory->export_arena(arena, Access::read_only, 9, &chunks, &base, &id));
  CHECK_OK(s.memory->open_import(DriverKind::cuda, 1, Access::read_only, chunks, &import, &there));
  CHECK(reinterpret_cast<unsigned char*>(there + (address - base))[99] == 7);
  for (const SharedChunk& chunk : chunks) close(chunk.fd);
  CHECK_OK(s.memory->close_import(import));
}

TEST(a_descriptor_of_something_else_is_a_bad_handle) {
  Setup s;
  uint64_t import = 0;
  uintptr_t base = 0;
  Status status = s.memory->open_import(DriverKind::cuda, 0, Access::read_only, {{0, 2 * kMiB, STDIN_FILENO}}, &import, &base);
  CHECK(status.code == Code::bad_handle);
}

TEST(an_export_at_the_descriptor_limit_is_told_apart) {
  Setup s;
  uint64_t arena = s.arena("weights"), id = 0;
  uintptr_t address = 0, base = 0;
  CHECK_OK(s.memory->allocate(arena, 12 * kMiB, &address));
  std::vector<SharedChunk> chunks;
  rlimit old{};
  getrlimit(RLIMIT_NOFILE, &old);
  int next = dup(STDERR_FILENO);
  close(next);
  rlimit tight{static_cast<rlim_t>(next) + 1, old.rlim_max};
  setrlimit(RLIMIT_NOFILE, &tight);
  Status status = s.memory->export_arena(arena, Access::read_only, 9, &chunks, &base, &id);
  setrlimit(RLIMIT_NOFILE, &old);
  CHECK(status.code == Code::fd_limit && chunks.empty());
  CHECK(dup(STDERR_FILENO) == next);  // the first descriptor was closed again
  close(next);
}

TEST(a_device_that_is_not_there_is_an_error) {
  Setup s;
  uint64_t arena = 0;
  CHECK(s.memory->create_arena(DriverKind::cuda, "weights", 7, {}, &arena).code == Code::driver);
}

TEST(a_driver_that_cannot_start_is_unavailable) {
  Fake fake;
  fake.fail("cuInit", 100);
  std::unique_ptr<Driver> driver;
  CHECK(open_cuda_driver(FAKE_CUDA, &driver).code == Code::unavailable);
}

extern "C" void* tasuki_torch_alloc_3(ssize_t bytes, int device, void* stream);
extern "C" void tasuki_torch_free(void* address, ssize_t bytes, int device, void* stream);

TEST(torch_allocates_in_the_arena_of_its_slot_and_a_foreign_free_is_refused) {
  CHECK(tasuki_open_cuda(FAKE_CUDA) == TASUKI_OK && tasuki_open_cuda(FAKE_CUDA) == TASUKI_OK);
  tasuki_arena_options options{64 * kMiB, 2 * kMiB, 2 * kMiB};
  uint64_t arena = 0;
  CHECK(tasuki_create_arena(TASUKI_CUDA, "kv_cache", 0, &options, &arena) == TASUKI_OK);
  CHECK(tasuki_torch_alloc_3(2 * kMiB, 0, nullptr) == nullptr);  // not bound yet
  CHECK(tasuki_bind_slot(3, 0, arena) == TASUKI_OK);
  void* address = tasuki_torch_alloc_3(2 * kMiB, 0, nullptr);
  tasuki_usage usage{};
  CHECK(address != nullptr && tasuki_get_usage(arena, &usage) == TASUKI_OK && usage.used_bytes == 2 * kMiB);
  int other = 0;
  tasuki_torch_free(&other, 4, 0, nullptr);
  tasuki_totals totals{};
  CHECK(tasuki_get_totals(&totals) == TASUKI_OK && totals.num_refused_frees == 1);
  CHECK(tasuki_torch_alloc_3(256 * kMiB, 0, nullptr) == nullptr);
  tasuki_torch_free(address, 2 * kMiB, 0, nullptr);
  CHECK(tasuki_get_usage(arena, &usage) == TASUKI_OK && usage.num_blocks == 0 && usage.mapped_bytes == 0);
  CHECK(tasuki_destroy_arena(arena) == TASUKI_OK);
}
