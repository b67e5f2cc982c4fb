// Arenas of two processes' Memory over one pool of real memfd chunks.
#include "../pool.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "../memory.h"
#include "check.h"
#include "pool_setup.h"

using namespace tasuki;

TEST(chunks_pass_from_one_to_the_other_and_back_at_the_same_addresses) {
  PoolSetup s(4);
  Side trainer(s, {101, 1}), rollout(s, {202, 1});
  unsigned char* a = trainer.block(3);
  std::fill_n(a, 3 * kChunk, 1);
  CHECK(rollout.block_or_null(2) == nullptr);
  CHECK(trainer.pause() == 3 * kChunk && s.usage().num_free == 4);
  unsigned char* b = rollout.block(4);
  std::fill_n(b, 4 * kChunk, 2);
  CHECK(trainer.resume().code == Code::out_of_memory && s.usage().num_mapped == 4 && b[0] == 2);
  CHECK(rollout.pause() == 4 * kChunk);
  CHECK_OK(trainer.resume());
  a[0] = 3;
  CHECK(s.usage().num_mapped == 3 && s.usage().num_free == 1);
}

TEST(content_comes_back_whoever_had_the_chunks_meanwhile) {
  PoolSetup s(2);
  Side trainer(s, {101, 1}), rollout(s, {202, 1});
  CHECK_OK(trainer.memory.set_policy(trainer.arena, {true, false}));
  unsigned char* a = trainer.block(2);
  std::fill_n(a, 2 * kChunk, 7);
  trainer.pause();
  std::fill_n(rollout.block(2), 2 * kChunk, 9);
  rollout.pause();
  CHECK_OK(trainer.resume());
  CHECK(a[0] == 7 && a[2 * kChunk - 1] == 7);
}

TEST(a_chunk_that_is_kept_over_a_pause_is_lent_to_nobody) {
  PoolSetup s(2);
  Side trainer(s, {101, 1}), rollout(s, {202, 1});
  CHECK_OK(trainer.memory.set_policy(trainer.arena, {false, true}));
  unsigned char* a = trainer.block(1);
  a[5] = 7;
  CHECK(trainer.pause() == 0 && s.usage().num_lent == 1 && rollout.block_or_null(2) == nullptr);
  CHECK_OK(trainer.resume());
  CHECK(a[5] == 7);
}

TEST(a_refusal_names_needed_and_free_bytes_and_changes_nothing) {
  PoolSetup s(4);
  Side trainer(s, {101, 1}), rollout(s, {202, 1});
  unsigned char* a = trainer.block(3);
  trainer.pause();
  rollout.block(2);
  Status status = trainer.resume();
  CHECK(status.code == Code::out_of_memory && status.needed_bytes == 3 * kChunk && status.free_bytes == 2 * kChunk);
  CHECK(s.usage().num_free == 2 && s.usage().num_lent == 0);
  rollout.pause();
  CHECK_OK(trainer.resume());
  a[0] = 1;
}

TEST(a_pool_larger_than_the_machine_is_refused_with_numbers) {
  auto driver = make_host_driver();
  std::vector<int> fds;
  size_t free_bytes = 0, total_bytes = 0;
  CHECK_OK(driver->room(0, &free_bytes, &total_bytes));
  Status status = make_pool(*driver, 0, 1000, (total_bytes / 500) & ~size_t{4095}, &fds);
  CHECK(status.code == Code::out_of_memory && status.needed_bytes > total_bytes && status.free_bytes <= total_bytes && fds.empty());
  CHECK(has(status.message, "for the pool"));
  CHECK(make_pool(*driver, 0, 1, 1000, &fds).code == Code::bad_argument);
}

TEST(the_chunks_are_there_before_anybody_touches_them) {
  PoolSetup s(3);
  for (size_t i = 1; i < s.fds.size(); ++i) {
    struct stat file;
    CHECK(fstat(s.fds[i], &file) == 0 && static_cast<size_t>(file.st_blocks) * 512 == kChunk);
  }
}

TEST(a_reader_keeps_published_chunks_from_others) {
  PoolSetup s(2);
  Side trainer(s, {101, 1}), rollout(s, {202, 1});
  unsigned char* a = trainer.block(1);
  a[9] = 5;
  std::vector<SharedChunk> chunks;
  uintptr_t base = 0, there = 0;
  uint64_t id = 0, import = 0;
  CHECK(trainer.memory.export_arena(trainer.arena, Access::read_write, 9, &chunks, &base, &id).code == Code::bad_argument);
  CHECK_OK(trainer.memory.export_arena(trainer.arena, Access::read_only, 9, &chunks, &base, &id));
  CHECK(rollout.memory.open_import(DriverKind::host, 0, Access::read_write, chunks, &import, &there).code == Code::bad_handle);
  CHECK_OK(rollout.memory.open_import(DriverKind::host, 0, Access::read_only, chunks, &import, &there));
  CHECK(reinterpret_cast<unsigned char*>(there)[9] == 5 && s.usage().num_read == 1);
  CHECK_OK(trainer.memory.close_export(id));
  CHECK(trainer.pause() == kChunk && rollout.block_or_null(2) == nullptr);
  CHECK(rollout.memory.renew_import(import, chunks).code == Code::bad_argument);
  CHECK_OK(rollout.memory.release_import(import));
  // Sent before the chunk was given back, opened after: what lies there is nobody's.
  CHECK(rollout.memory.renew_import(import, chunks).code == Code::bad_handle);
  CHECK(s.usage().num_read == 0 && rollout.block_or_null(2) != nullptr);
  CHECK_OK(rollout.memory.close_import(import));
  close(chunks[0].fd);
}

namespace {

// Chunks that a trainer publishes, and an import of them by a reader, which has joined the pool `joined`.
struct Reading {
  PoolSetup theirs{4}, ours{1};
  Side trainer{theirs, {101, 1}}, rollout;
  unsigned char* block;
  std::vector<SharedChunk> chunks;
  uint64_t id = 0, import = 0;
  uintptr_t there = 0;
  explicit Reading(PoolSetup Reading::*joined) : rollout(this->*joined, {202, 1}), block(trainer.block(2)) {
    publish(1);
    CHECK_OK(rollout.memory.open_import(DriverKind::host, 0, Access::read_only, chunks, &import, &there));
  }
  ~Reading() { withdraw(); }
  void publish(unsigned char first) {
    uintptr_t base = 0;
    std::fill_n(block, 2 * kChunk, first);
    CHECK_OK(trainer.memory.export_arena(trainer.arena, Access::read_only, 9, &chunks, &base, &id));
  }
  void withdraw() {
    for (const SharedChunk& chunk : chunks) close(chunk.fd);
    chunks.clear();
    CHECK_OK(trainer.memory.close_export(id));
  }
  // The reader lets go, and the trainer publishes from what it has after a pause.
  void come_back(unsigned char first) {
    CHECK_OK(rollout.memory.release_import(import));
    withdraw();
    trainer.pause();
    CHECK_OK(trainer.resume());
    publish(first);
  }
  Status renew() { return rollout.memory.renew_import(import, chunks); }
  bool reads(unsigned char first) const {
    auto* seen = reinterpret_cast<unsigned char*>(there);
    return seen[0] == first && seen[2 * kChunk - 1] == first;
  }
  // The kernel itself looks whether the page can be written to, or read.
  bool can_write() const { return is_accessible([this](int* fds) { return ::write(fds[1], "x", 1) == 1 && ::read(fds[0], at(), 1) == 1; }); }
  bool can_read() const { return is_accessible([this](int* fds) { return ::write(fds[1], at(), 1) == 1; }); }

 private:
  void* at() const { return reinterpret_cast<void*>(there); }
  template <typename Access>
  static bool is_accessible(Access access) {
    int fds[2];
    CHECK(::pipe(fds) == 0);
    bool answer = access(fds);
    return close(fds[0]), close(fds[1]), answer;
  }
};

size_t num_descriptors() {
  size_t num_open = 0;
  for (int fd = 0; fd < 1024; ++fd) num_open += fcntl(fd, F_GETFD) >= 0;
  return num_open;
}

}  // namespace

TEST(a_reader_that_has_joined_the_pool_imports_no_chunk) {
  uint64_t before = num_imported_chunks();
  Reading s(&Reading::theirs);
  for (unsigned char round = 2; round < 5; ++round) {
    s.come_back(round);
    CHECK(s.theirs.usage().num_read == 0);
    CHECK_OK(s.renew());
    CHECK(s.reads(round) && s.can_read() && !s.can_write() && s.theirs.usage().num_read == 2);
  }
  CHECK(num_imported_chunks() == before);
  CHECK_OK(s.rollout.memory.close_import(s.import));
  CHECK(s.theirs.usage().num_read == 0);
}

TEST(chunks_of_another_pool_are_imported_once) {
  size_t num_open = num_descriptors();
  {
    uint64_t before = num_imported_chunks();
    Reading s(&Reading::ours);
    Side other(s.theirs, {303, 1});
    CHECK(num_imported_chunks() == before + 2);
    for (unsigned char round = 2; round < 5; ++round) {
      s.come_back(round);
      CHECK_OK(s.renew());
      CHECK(s.reads(round) && !s.can_write());
    }
    CHECK(num_imported_chunks() == before + 2);
    size_t num_before = num_descriptors();
    // Another process has taken the lowest chunk meanwhile, so the trainer has one that the reader does not know.
    CHECK_OK(s.rollout.memory.release_import(s.import));
    s.withdraw();
    s.trainer.pause();
    unsigned char* taken = other.block(1);
    CHECK_OK(s.trainer.resume());
    s.publish(9);
    CHECK_OK(s.renew());
    CHECK(s.reads(9) && num_imported_chunks() == before + 3);
    CHECK(num_descriptors() == num_before);  // the handle of a chunk that the trainer no longer has is released
    CHECK_OK(other.memory.release(reinterpret_cast<uintptr_t>(taken)));
    CHECK_OK(s.rollout.memory.close_import(s.import));
    CHECK_OK(s.rollout.memory.open_import(DriverKind::host, 0, Access::read_only, s.chunks, &s.import, &s.there));
    CHECK(s.reads(9) && num_imported_chunks() == before + 5);
  }
  CHECK(num_descriptors() == num_open);
}

TEST(a_chunk_whose_reader_has_ended_reading_is_lent_though_its_mapping_stays) {
  for (PoolSetup Reading::*joined : {&Reading::theirs, &Reading::ours}) {
    Reading s(joined);
    Side other(s.theirs, {303, 1});
    CHECK_OK(s.rollout.memory.release_import(s.import));
    s.withdraw();
    s.trainer.pause();
    unsigned char* taken = other.block(2);
    taken[0] = 7;
    CHECK(s.theirs.usage().num_read == 0 && s.can_read() && !s.can_write());
    CHECK_OK(s.trainer.resume());
    s.publish(5);
    CHECK_OK(s.renew());
    CHECK(s.reads(5) && taken[0] == 7);
  }
}

TEST(an_arena_takes_the_chunks_that_it_had_if_they_are_free) {
  PoolSetup s(4);
  Side trainer(s, {101, 1}), rollout(s, {202, 1});
  unsigned char *low = rollout.block(1), *block = trainer.block(2);
  block[0] = 5;
  trainer.pause();
  CHECK_OK(rollout.memory.release(reinterpret_cast<uintptr_t>(low)));
  CHECK_OK(trainer.resume());
  CHECK(block[0] == 5);  // chunks 1 and 2, not 0 and 1
  trainer.pause();
  unsigned char* taken = rollout.block(2);
  taken[0] = 6;
  CHECK_OK(trainer.resume());
  CHECK(taken[0] == 6 && s.usage().num_mapped == 4);
}

TEST(an_arena_that_has_lost_a_chunk_takes_its_others_again) {
  PoolSetup s(6);
  Side trainer(s, {101, 1}), rollout(s, {202, 1});
  rollout.block(1);
  unsigned char* block = trainer.block(4);
  for (unsigned char i = 0; i < 4; ++i) block[i * kChunk] = i + 1;
  trainer.pause();
  rollout.block(1);  // the trainer's lowest
  CHECK_OK(trainer.resume());
  for (unsigned char i = 1; i < 4; ++i) CHECK(block[i * kChunk] == i + 1);
}

TEST(a_pool_cannot_be_closed_while_an_import_may_be_renewed) {
  for (PoolSetup Reading::*joined : {&Reading::theirs, &Reading::ours}) {
    Reading s(joined);
    CHECK_OK(s.rollout.memory.release_import(s.import));
    CHECK_OK(s.rollout.memory.destroy_arena(s.rollout.arena));
    CHECK(s.rollout.memory.close_pool(DriverKind::host, 0).code == Code::busy);
    CHECK_OK(s.rollout.memory.close_import(s.import));
    CHECK_OK(s.rollout.memory.close_pool(DriverKind::host, 0));
  }
}

TEST(a_chunk_that_is_not_what_its_place_says_is_refused_and_nothing_is_mapped) {
  for (PoolSetup Reading::*joined : {&Reading::theirs, &Reading::ours}) {
    Reading s(joined);
    CHECK_OK(s.rollout.memory.release_import(s.import));
    std::vector<SharedChunk> true_chunks = s.chunks;
    auto refuses = [&] {
      bool is_refused = s.renew().code == Code::bad_handle && !s.can_read() && s.theirs.usage().num_read == 0;
      s.chunks = true_chunks;
      return is_refused;
    };
    s.chunks[1].bytes = kChunk / 2;
    CHECK(refuses());
    std::swap(s.chunks[0].place, s.chunks[1].place);
    CHECK(refuses());
    s.chunks[1].place = s.chunks[0].place;
    CHECK(refuses());
    if (joined == &Reading::theirs) {
      s.chunks[1].place.index = 4;
      CHECK(refuses());
    }
    CHECK_OK(s.renew());
    CHECK(s.reads(1));
  }
}

TEST(a_forked_child_neither_sees_nor_maps_chunks_that_its_parent_reads) {
  for (PoolSetup Reading::*joined : {&Reading::theirs, &Reading::ours}) {
    for (bool is_released : {false, true}) {
      Reading s(joined);
      if (is_released) CHECK_OK(s.rollout.memory.release_import(s.import));
      pid_t pid = fork();
      if (pid == 0) _exit(!s.can_read() && (!is_released || s.renew().code == Code::driver) ? 0 : 1);
      int status = 0;
      waitpid(pid, &status, 0);
      CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
  }
}

TEST(a_forked_child_neither_sees_nor_takes_chunks) {
  PoolSetup s(2);
  Side trainer(s, {101, 1});
  unsigned char* a = trainer.block(1);
  a[0] = 1;
  pid_t pid = fork();
  if (pid == 0) {
    uintptr_t address = 0;
    bool is_refused = trainer.memory.allocate(trainer.arena, 2 * kChunk, &address).code == Code::driver;
    // The kernel itself looks whether there is a page.
    int fds[2];
    bool is_hidden = ::pipe(fds) == 0 && ::write(fds[1], a, 1) < 0;
    _exit(is_refused && is_hidden ? 0 : 1);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0 && s.usage().num_mapped == 1);
}

TEST(a_pool_is_opened_before_arenas_and_closed_after_them) {
  PoolSetup s(2);
  Side trainer(s, {101, 1});
  CHECK(trainer.memory.open_pool(DriverKind::host, 0, s.fds, {101, 1}).code == Code::busy);
  CHECK(trainer.memory.close_pool(DriverKind::host, 0).code == Code::busy);
  CHECK(trainer.memory.open_pool(DriverKind::host, 1, {}, {101, 1}).code == Code::bad_handle);
  CHECK(trainer.memory.open_pool(DriverKind::host, 1, {s.fds[0], s.fds[1]}, {101, 1}).code == Code::bad_handle);
  CHECK(trainer.memory.open_pool(DriverKind::host, 1, {s.fds[1], s.fds[1], s.fds[2]}, {101, 1}).code == Code::bad_handle);
  CHECK(trainer.memory.close_pool(DriverKind::host, 1).code == Code::not_found);
}
