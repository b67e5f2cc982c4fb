// The words that say who holds each chunk: every transition, its refusals, and threads that race for the same chunks.
#include "../pool_table.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "check.h"

using namespace tasuki;

namespace {

constexpr Owner kTrainer{101, 7}, kRollout{202, 9};

struct Table {
  int fd = -1;
  std::unique_ptr<PoolTable> words;
  explicit Table(size_t num_chunks) {
    CHECK_OK(PoolTable::make(num_chunks, 4096, &fd));
    CHECK_OK(PoolTable::open(fd, &words));
  }
  ~Table() { close(fd); }
  size_t take(const Owner& owner) {
    size_t index = 0;
    CHECK(words->take(owner, &index));
    return index;
  }
};

bool is(const Owner& owner, const Owner& other) { return owner.pid == other.pid && owner.start == other.start; }

pid_t sleeping_child() {
  pid_t pid = fork();
  if (pid == 0) {
    pause();
    _exit(0);
  }
  return pid;
}

}  // namespace

TEST(a_chunk_goes_through_its_states_and_back) {
  Table t(2);
  size_t index = t.take(kTrainer);
  CHECK(index == 0 && t.words->usage().num_lent == 1 && t.words->usage().num_free == 1);
  CHECK(t.words->begin_map(kTrainer, index) && t.words->usage().num_mapped == 1);
  CHECK(!t.words->give_back(kTrainer, index));
  CHECK(t.words->publish(kTrainer, index) && t.words->publish(kTrainer, index) && t.words->usage().num_published == 1);
  CHECK(t.words->end_map(kTrainer, index) && t.words->usage().num_published == 1);
  CHECK(t.words->begin_map(kTrainer, index) && t.words->end_map(kTrainer, index));
  CHECK(t.words->give_back(kTrainer, index) && t.words->usage().num_free == 2 && t.words->usage().num_published == 0);
}

TEST(nobody_moves_anothers_chunk) {
  Table t(1);
  size_t index = t.take(kTrainer), other = 0;
  CHECK(!t.words->take(kRollout, &other));
  for (const Owner& stranger : {kRollout, Owner{kTrainer.pid, kTrainer.start + 1}}) {
    CHECK(!t.words->begin_map(stranger, index) && !t.words->publish(stranger, index) && !t.words->give_back(stranger, index));
  }
  CHECK(t.words->begin_map(kTrainer, index) && !t.words->begin_map(kTrainer, index) && !t.words->end_map(kRollout, index));
  CHECK(!t.words->begin_map(kTrainer, 99) && !t.words->publish(kTrainer, 99) && !t.words->give_back(kTrainer, 99));
}

TEST(a_chunk_with_readers_is_lent_to_nobody) {
  Table t(1);
  size_t index = t.take(kTrainer), other = 0;
  CHECK(t.words->add_reader(kRollout, index).code == Code::bad_handle);
  CHECK(t.words->publish(kTrainer, index));
  CHECK_OK(t.words->add_reader(kRollout, index));
  CHECK(t.words->give_back(kTrainer, index));
  CHECK(t.words->usage().num_free == 0 && t.words->usage().num_read == 1 && !t.words->take(kTrainer, &other));
  CHECK(t.words->add_reader(kTrainer, index).code == Code::bad_handle);  // given back: what lies there is nobody's
  t.words->remove_reader(kRollout, index);
  CHECK(t.words->take(kTrainer, &other) && other == index);
}

TEST(readers_beyond_the_words_for_them_are_refused) {
  Table t(1);
  size_t index = t.take(kTrainer);
  CHECK(t.words->publish(kTrainer, index));
  for (size_t i = 0; i < PoolTable::kMaxReaders; ++i) CHECK_OK(t.words->add_reader(kRollout, index));
  CHECK(t.words->add_reader(kRollout, index).code == Code::busy);
  CHECK(t.words->add_reader(kRollout, 99).code == Code::bad_argument);
}

TEST(only_what_the_dead_hold_is_reclaimed) {
  Table t(4);
  size_t mapped = t.take(kTrainer), read = t.take(kRollout);
  CHECK(t.words->begin_map(kTrainer, mapped) && t.words->publish(kRollout, read));
  CHECK_OK(t.words->add_reader(kTrainer, read));
  CHECK(t.words->reclaim([](const Owner&) { return false; }) == 0);
  CHECK(t.words->reclaim([](const Owner& owner) { return is(owner, kTrainer); }) == 2);
  CHECK(t.words->usage().num_free == 3 && t.words->usage().num_read == 0);
  CHECK(t.words->reclaim([](const Owner& owner) { return is(owner, kRollout); }) == 1 && t.words->usage().num_free == 4);
}

TEST(a_published_chunk_of_the_dead_waits_for_its_readers) {
  Table t(1);
  size_t index = t.take(kTrainer), other = 0;
  CHECK(t.words->publish(kTrainer, index));
  CHECK_OK(t.words->add_reader(kRollout, index));
  CHECK(t.words->reclaim([](const Owner& owner) { return is(owner, kTrainer); }) == 1);
  CHECK(!t.words->take(kTrainer, &other));
  t.words->remove_reader(kRollout, index);
  CHECK(t.words->take(kTrainer, &other));
}

TEST(death_is_certain_when_the_kernel_says_so_and_not_before) {
  Owner owner, nobody;
  pid_t pid = sleeping_child();
  CHECK_OK(identify(static_cast<uint32_t>(pid), &owner));
  CHECK(!is_certainly_dead(owner) && is_certainly_dead({owner.pid, owner.start + 1}));
  int status = 0;
  kill(pid, SIGSTOP);
  CHECK(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status) && !is_certainly_dead(owner));
  kill(pid, SIGKILL);
  siginfo_t info{};
  CHECK(waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT) == 0);
  CHECK(is_certainly_dead(owner));  // a zombie, all of whose threads have ended
  CHECK(waitpid(pid, &status, 0) == pid && is_certainly_dead(owner));
  CHECK(identify(static_cast<uint32_t>(pid), &nobody).code == Code::not_found);
}

TEST(what_is_no_table_is_refused) {
  std::unique_ptr<PoolTable> table;
  int fd = -1;
  CHECK(PoolTable::make(0, 4096, &fd).code == Code::bad_argument && fd == -1);
  CHECK(PoolTable::make(PoolTable::kMaxChunks + 1, 4096, &fd).code == Code::bad_argument);
  CHECK(PoolTable::open(9999, &table).code == Code::bad_handle);
  int unsealed = memfd_create("table", MFD_ALLOW_SEALING);
  CHECK(PoolTable::open(unsealed, &table).code == Code::bad_handle);
  CHECK(ftruncate(unsealed, 8192) == 0 && fcntl(unsealed, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  CHECK(PoolTable::open(unsealed, &table).code == Code::bad_handle && table == nullptr);
  close(unsealed);
}

// Plain memory in place of the content of chunks: ThreadSanitizer reports two that touch one chunk without an order between them.
TEST(threads_that_race_for_chunks_never_hold_one_together) {
  constexpr size_t kNumChunks = 3, kNumThreads = 4;
  Table t(kNumChunks);
  std::vector<uint64_t> content(kNumChunks, 0);
  std::vector<std::thread> threads;
  for (size_t number = 1; number <= kNumThreads; ++number) {
    threads.emplace_back([&t, &content, number] {
      Owner self{static_cast<uint32_t>(number), number};
      for (int i = 0; i < 20000; ++i) {
        size_t index = 0;
        if (!t.words->take(self, &index)) continue;
        CHECK(t.words->begin_map(self, index));
        content[index] = number;
        if (i % 3 == 0) CHECK(t.words->publish(self, index));
        CHECK(content[index] == number);
        CHECK(t.words->end_map(self, index) && t.words->give_back(self, index));
      }
    });
  }
  threads.emplace_back([&t, &content] {
    for (int i = 0; i < 20000; ++i) {
      size_t index = static_cast<size_t>(i) % kNumChunks;
      if (t.words->add_reader(kRollout, index).ok()) t.words->remove_reader(kRollout, index);
      t.words->reclaim([](const Owner&) { return false; });
    }
  });
  for (std::thread& thread : threads) thread.join();
  CHECK(t.words->usage().num_free == kNumChunks);
}

// A reader keeps what it reads from changing hands, though not from being written by the owner it reads from.
TEST(a_reader_never_sees_another_owners_bytes) {
  Table t(1);
  uint64_t content = 0;
  std::atomic<bool> is_over{false};
  std::thread reader([&] {
    while (!is_over) {
      if (!t.words->add_reader(kRollout, 0).ok()) continue;
      CHECK(content % 2 == 1);  // what its owner had written when it published
      t.words->remove_reader(kRollout, 0);
    }
  });
  for (int i = 0; i < 20000; ++i) {
    size_t index = 0;
    if (!t.words->take(kTrainer, &index)) continue;
    CHECK(t.words->begin_map(kTrainer, index));
    content += 1;
    if (content % 2 == 1) CHECK(t.words->publish(kTrainer, index));
    CHECK(t.words->end_map(kTrainer, index) && t.words->give_back(kTrainer, index));
  }
  is_over = true;
  reader.join();
}
