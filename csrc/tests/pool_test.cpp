// Arenas of two processes' Memory over one pool of real memfd chunks.
#include "../pool.h"

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
