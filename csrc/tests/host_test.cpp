// The C functions over real memfd memory: resident pages, descriptors, peers in other processes.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <dirent.h>
#include <thread>

#include "../status.h"
#include "../tasuki_memory.h"
#include "check.h"

namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr tasuki_arena_options kSmall{uint64_t{1} << 30, kMiB, 4 * kMiB};

#define CHECK_CODE(expected, call)                                                                                       \
  do {                                                                                                                   \
    int got_code = (call);                                                                                               \
    if (got_code != (expected)) {                                                                                        \
      std::fprintf(stderr, "%s:%d: %s: code %d: %s\n", __FILE__, __LINE__, #call, got_code, tasuki_last_error());        \
      std::exit(1);                                                                                                      \
    }                                                                                                                    \
  } while (0)

uint64_t make_arena(const char* tag) {
  uint64_t arena = 0;
  CHECK_CODE(TASUKI_OK, tasuki_create_arena(TASUKI_HOST, tag, 0, &kSmall, &arena));
  return arena;
}

unsigned char* make_block(uint64_t arena, uint64_t bytes, int value) {
  void* address = nullptr;
  CHECK_CODE(TASUKI_OK, tasuki_allocate(arena, bytes, &address));
  std::memset(address, value, bytes);
  return static_cast<unsigned char*>(address);
}

uint64_t pause(uint64_t arena, uint32_t flags) {
  uint64_t bytes = 0;
  CHECK_CODE(TASUKI_OK, tasuki_set_policy(arena, flags));
  CHECK_CODE(TASUKI_OK, tasuki_pause(&arena, 1, &bytes));
  return bytes;
}

uint64_t resume(uint64_t arena) {
  uint64_t bytes = 0;
  CHECK_CODE(TASUKI_OK, tasuki_resume(&arena, 1, &bytes));
  return bytes;
}

uint64_t resident_bytes() {
  FILE* file = std::fopen("/proc/self/statm", "r");
  unsigned long size = 0, resident = 0;
  CHECK(std::fscanf(file, "%lu %lu", &size, &resident) == 2);
  std::fclose(file);
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

int num_open_fds() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

int num_mappings() {
  FILE* file = std::fopen("/proc/self/maps", "r");
  int count = 0;
  for (int c = 0; (c = std::fgetc(file)) != EOF;) count += c == '\n';
  std::fclose(file);
  return count;
}

struct Exported {
  uint64_t id = 0;
  void* base = nullptr;
  std::vector<tasuki_chunk> chunks;
  Exported(uint64_t arena, int access) : chunks(64) {
    size_t num_chunks = 0;
    CHECK_CODE(TASUKI_OK, tasuki_export(arena, access, chunks.data(), chunks.size(), &num_chunks, &base, &id));
    chunks.resize(num_chunks);
  }
  ~Exported() {
    for (const tasuki_chunk& chunk : chunks) close(chunk.fd);
  }
};

}  // namespace

TEST(resident_memory_falls_and_comes_back_at_the_same_address) {
  uint64_t arena = make_arena("weights");
  uint64_t before = resident_bytes();
  unsigned char* block = make_block(arena, 64 * kMiB, 1);
  uint64_t full = resident_bytes();
  CHECK(full > before + 63 * kMiB);
  CHECK(pause(arena, 0) == 64 * kMiB);
  CHECK(resident_bytes() < full - 63 * kMiB);
  CHECK(resume(arena) == 64 * kMiB && block[0] == 0);
  std::memset(block, 2, 64 * kMiB);
  CHECK(resident_bytes() > before + 63 * kMiB);
  CHECK_CODE(TASUKI_OK, tasuki_free(block));
  CHECK(resident_bytes() < before + kMiB);
  CHECK_CODE(TASUKI_OK, tasuki_destroy_arena(arena));
}

TEST(a_sleeping_page_kills_who_touches_it_and_nobody_else) {
  uint64_t arena = make_arena("weights");
  unsigned char* block = make_block(arena, kMiB, 1);
  pause(arena, TASUKI_KEEP_CONTENT);
  pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);
    _exit(block[0]);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(!WIFEXITED(status) || WEXITSTATUS(status) != 1);
  resume(arena);
  CHECK(block[0] == 1 && block[kMiB - 1] == 1);
  tasuki_free(block);
  tasuki_destroy_arena(arena);
}

TEST(a_resume_above_the_budget_is_a_clean_error) {
  uint64_t arena = make_arena("kv_cache"), other = make_arena("weights"), bytes = 0;
  unsigned char* block = make_block(arena, 32 * kMiB, 1);
  pause(arena, 0);
  CHECK_CODE(TASUKI_OK, tasuki_set_host_budget(40 * kMiB));
  unsigned char* in_the_way = make_block(other, 16 * kMiB, 1);
  CHECK_CODE(TASUKI_OUT_OF_MEMORY, tasuki_resume(&arena, 1, &bytes));
  uint64_t needed = 0, available = 0;
  tasuki_last_room(&needed, &available);
  CHECK(needed == 32 * kMiB && available == 24 * kMiB);
  CHECK(has(tasuki_last_error(), "needs 32.00 MiB for kv_cache, 24.00 MiB free"));
  tasuki_free(in_the_way);
  CHECK(resume(arena) == 32 * kMiB);
  tasuki_set_host_budget(0);
  tasuki_free(block);
  tasuki_destroy_arena(arena), tasuki_destroy_arena(other);
}

TEST(a_peer_sees_the_bytes_and_a_read_only_one_cannot_write) {
  uint64_t arena = make_arena("weights"), import = 0, bytes = 0;
  unsigned char* block = make_block(arena, 9 * kMiB, 5);
  Exported exported(arena, TASUKI_READ_ONLY);
  void* base = nullptr;
  CHECK_CODE(TASUKI_BAD_HANDLE, tasuki_import(TASUKI_HOST, 0, TASUKI_READ_WRITE, exported.chunks.data(), exported.chunks.size(), &import, &base));
  CHECK_CODE(TASUKI_OK, tasuki_import(TASUKI_HOST, 0, TASUKI_READ_ONLY, exported.chunks.data(), exported.chunks.size(), &import, &base));
  auto* there = static_cast<unsigned char*>(base) + (block - static_cast<unsigned char*>(exported.base));
  CHECK(there[0] == 5 && there[9 * kMiB - 1] == 5);
  block[77] = 6;
  CHECK(there[77] == 6);
  CHECK_CODE(TASUKI_OK, tasuki_pause(&arena, 1, &bytes));
  CHECK(bytes == 0 && there[77] == 6);  // the importer keeps the old pages alive
  CHECK_CODE(TASUKI_OK, tasuki_close_import(import));
  CHECK_CODE(TASUKI_OK, tasuki_close_export(exported.id));
  resume(arena);
  tasuki_free(block);
  tasuki_destroy_arena(arena);
}

TEST(handles_of_the_wrong_kind_or_size_are_refused) {
  uint64_t arena = make_arena("weights"), import = 0;
  unsigned char* block = make_block(arena, kMiB, 5);
  Exported exported(arena, TASUKI_READ_WRITE);
  void* base = nullptr;
  int before = num_open_fds();
  int file = open("/proc/self/exe", O_RDONLY);
  tasuki_chunk wrong[] = {{0, 4096, file}, {0, 4096, 9999}, {0, 2 * exported.chunks[0].bytes, exported.chunks[0].fd}};
  for (tasuki_chunk& chunk : wrong) CHECK_CODE(TASUKI_BAD_HANDLE, tasuki_import(TASUKI_HOST, 0, TASUKI_READ_ONLY, &chunk, 1, &import, &base));
  close(file);
  CHECK(num_open_fds() == before);
  CHECK(ftruncate(exported.chunks[0].fd, 0) != 0);  // sealed: nobody can shrink it under a reader
  tasuki_close_export(exported.id);
  tasuki_free(block);
  tasuki_destroy_arena(arena);
}

TEST(the_limit_of_descriptors_is_a_clean_error) {
  uint64_t arena = make_arena("weights");
  unsigned char* block = make_block(arena, 3 * kMiB, 5);
  rlimit old{}, tight{};
  getrlimit(RLIMIT_NOFILE, &old);
  tight = old;
  tight.rlim_cur = static_cast<rlim_t>(num_open_fds()) - 3;
  int before = num_open_fds();
  setrlimit(RLIMIT_NOFILE, &tight);
  void* address = nullptr;
  int code = tasuki_allocate(arena, 64 * kMiB, &address);
  std::string message = tasuki_last_error();
  setrlimit(RLIMIT_NOFILE, &old);
  CHECK(code == TASUKI_FD_LIMIT && has(message, "ulimit -n") && num_open_fds() == before);
  CHECK(block[0] == 5);
  CHECK_CODE(TASUKI_OK, tasuki_allocate(arena, 64 * kMiB, &address));
  tasuki_free(address), tasuki_free(block);
  tasuki_destroy_arena(arena);
}

TEST(three_hundred_cycles_leak_no_descriptor_mapping_or_page) {
  uint64_t arena = make_arena("weights");
  unsigned char* block = make_block(arena, 2 * kMiB, 5);
  pause(arena, TASUKI_KEEP_CONTENT), resume(arena);
  int fds = num_open_fds(), mappings = num_mappings();
  uint64_t resident = resident_bytes();
  for (int i = 0; i < 300; ++i) {
    pause(arena, static_cast<uint32_t>(TASUKI_KEEP_CONTENT | (i % 2 == 0 ? TASUKI_KEEP_CHUNKS : 0)));
    resume(arena);
    CHECK(block[0] == 5 && block[2 * kMiB - 1] == 5);
  }
  CHECK(num_open_fds() == fds);
  CHECK(num_mappings() <= mappings + 8);                // sanitizers add a few of their own
  CHECK(resident_bytes() < resident + 2 * kMiB);  // one leaked cycle would be as much
  tasuki_free(block);
  CHECK_CODE(TASUKI_OK, tasuki_destroy_arena(arena));
}

TEST(threads_allocate_free_pause_and_resume_at_once) {
  uint64_t shared = make_arena("weights");
  unsigned char* block = make_block(shared, 2 * kMiB, 5);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([t] {
      uint64_t own = make_arena("gradients");
      for (int i = 0; i < 100; ++i) {
        unsigned char* mine = make_block(own, static_cast<uint64_t>(1000 + 977 * i), t + 1);
        CHECK(mine[0] == t + 1);
        CHECK_CODE(TASUKI_OK, tasuki_free(mine));
      }
      CHECK_CODE(TASUKI_OK, tasuki_destroy_arena(own));
    });
  }
  CHECK_CODE(TASUKI_OK, tasuki_set_policy(shared, TASUKI_KEEP_CONTENT));
  threads.emplace_back([shared] {
    for (int i = 0; i < 100; ++i) {
      uint64_t ticket = 0, bytes = 0;
      CHECK_CODE(TASUKI_OK, tasuki_pause(&shared, 1, &bytes));
      CHECK_CODE(TASUKI_OK, tasuki_resume_async(&shared, 1, &ticket));
      CHECK_CODE(TASUKI_OK, tasuki_wait(ticket, &bytes));
    }
  });
  for (std::thread& thread : threads) thread.join();
  CHECK(block[0] == 5 && block[2 * kMiB - 1] == 5);
  tasuki_free(block);
  CHECK_CODE(TASUKI_OK, tasuki_destroy_arena(shared));
}

TEST(wrong_arguments_are_codes_not_crashes) {
  uint64_t bytes = 0, id = 0, unknown = 987654;
  void* address = nullptr;
  size_t num_chunks = 0;
  CHECK_CODE(TASUKI_BAD_ARGUMENT, tasuki_create_arena(7, "weights", 0, &kSmall, &id));
  CHECK_CODE(TASUKI_BAD_ARGUMENT, tasuki_create_arena(TASUKI_HOST, nullptr, 0, &kSmall, &id));
  CHECK_CODE(TASUKI_BAD_ARGUMENT, tasuki_create_arena(TASUKI_HOST, "weights", -1, &kSmall, &id));
  CHECK_CODE(TASUKI_BAD_ARGUMENT, tasuki_set_policy(unknown, 64));
  CHECK_CODE(TASUKI_NOT_FOUND, tasuki_set_policy(unknown, 0));
  CHECK_CODE(TASUKI_NOT_FOUND, tasuki_pause(&unknown, 1, &bytes));
  CHECK_CODE(TASUKI_BAD_ARGUMENT, tasuki_pause(nullptr, 1, &bytes));
  CHECK_CODE(TASUKI_NOT_FOUND, tasuki_allocate(unknown, 1, &address));
  CHECK_CODE(TASUKI_NOT_FOUND, tasuki_free(&bytes));
  CHECK_CODE(TASUKI_NOT_FOUND, tasuki_free(nullptr));
  CHECK_CODE(TASUKI_NOT_FOUND, tasuki_wait(unknown, &bytes));
  CHECK_CODE(TASUKI_NOT_FOUND, tasuki_export(unknown, TASUKI_READ_ONLY, nullptr, 0, &num_chunks, &address, &id));
  CHECK_CODE(TASUKI_BAD_ARGUMENT, tasuki_bind_slot(99, 0, 1));
  CHECK_CODE(TASUKI_UNAVAILABLE, tasuki_create_arena(TASUKI_CUDA, "weights", 0, &kSmall, &id));
  CHECK_CODE(TASUKI_UNAVAILABLE, tasuki_open_cuda("/nonexistent/libcuda.so"));
  CHECK(has(tasuki_last_error(), "no CUDA driver on this machine"));
}

TEST(an_arena_full_to_its_last_byte_says_so) {
  uint64_t arena = 0;
  tasuki_arena_options tiny{8 * kMiB, kMiB, 4 * kMiB};
  CHECK_CODE(TASUKI_OK, tasuki_create_arena(TASUKI_HOST, "weights", 0, &tiny, &arena));
  unsigned char* block = make_block(arena, 8 * kMiB, 1);
  void* address = nullptr;
  CHECK_CODE(TASUKI_OUT_OF_MEMORY, tasuki_allocate(arena, 1, &address));
  CHECK_CODE(TASUKI_OUT_OF_MEMORY, tasuki_allocate(arena, UINT64_MAX, &address));
  tasuki_free(block);
  tasuki_destroy_arena(arena);
}
