// SIGKILL at every step of a process that takes, maps, publishes, reads and gives back chunks: at each write to the table, at each system
// call, and at random times beside others. What it held comes back when it is dead, and not while it is stopped.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <random>

#include "../memory.h"
#include "check.h"
#include "pool_setup.h"

using namespace tasuki;

namespace {

constexpr size_t kNumChunks = 6;

Owner self() {
  Owner owner;
  CHECK_OK(identify(static_cast<uint32_t>(getpid()), &owner));
  return owner;
}

// Takes, grows, publishes, reads itself, sleeps, wakes, and gives everything back.
void live(const PoolSetup& setup, void (*when_joined)()) {
  Side side(setup, self());
  when_joined();
  unsigned char* block = side.block(2);
  std::fill_n(block, 2 * kChunk, 1);
  unsigned char* other = side.block(1);
  std::vector<SharedChunk> chunks;
  uintptr_t base = 0, there = 0;
  uint64_t id = 0, import = 0;
  CHECK_OK(side.memory.export_arena(side.arena, Access::read_only, 9, &chunks, &base, &id));
  CHECK_OK(side.memory.open_import(DriverKind::host, 0, Access::read_only, chunks, &import, &there));
  CHECK(reinterpret_cast<unsigned char*>(there)[0] == 1);
  CHECK_OK(side.memory.close_import(import));
  CHECK_OK(side.memory.close_export(id));
  side.pause();
  CHECK_OK(side.resume());
  CHECK_OK(side.memory.release(reinterpret_cast<uintptr_t>(other)));
  CHECK_OK(side.memory.release(reinterpret_cast<uintptr_t>(block)));
}

// Every chunk is there again, and can be written by whoever takes it.
void check_all_free(PoolSetup& setup) {
  setup.table->reclaim(is_certainly_dead);
  CHECK(setup.usage().num_free == kNumChunks);
  Side heir(setup, self());
  unsigned char* block = heir.block(kNumChunks);
  std::fill_n(block, kNumChunks * kChunk, 9);
  CHECK_OK(heir.memory.release(reinterpret_cast<uintptr_t>(block)));
}

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)

// The table's pages are protected: each write to them faults, is counted, and is let through alone.
char* table_start = nullptr;
size_t table_bytes = 0;
int num_writes = 0, stop_at = 0;
bool stops_behind = false;

void stop_here(bool is_behind) {
  if (num_writes == stop_at && is_behind == stops_behind) kill(getpid(), SIGSTOP);
}

void before_write(int number, siginfo_t* info, void* context) {
  char* address = static_cast<char*>(info->si_addr);
  if (address < table_start || address >= table_start + table_bytes) _exit(100 + number);
  ++num_writes;
  stop_here(false);
  mprotect(table_start, table_bytes, PROT_READ | PROT_WRITE);
  static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL] |= 0x100;  // a trap behind the next instruction
}

void behind_write(int, siginfo_t*, void* context) {
  mprotect(table_start, table_bytes, PROT_READ);
  static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL] &= ~0x100LL;
  stop_here(true);
}

void protect_table() {
  FILE* file = std::fopen("/proc/self/maps", "r");
  char line[512];
  unsigned long start = 0, end = 0;
  while (table_start == nullptr && std::fgets(line, sizeof line, file) != nullptr) {
    if (std::strstr(line, "tasuki-pool-table") == nullptr || std::sscanf(line, "%lx-%lx", &start, &end) != 2) continue;
    table_start = reinterpret_cast<char*>(start);
    table_bytes = end - start;
  }
  std::fclose(file);
  struct sigaction action {};
  action.sa_flags = SA_SIGINFO;
  action.sa_sigaction = before_write;
  sigaction(SIGSEGV, &action, nullptr);
  action.sa_sigaction = behind_write;
  sigaction(SIGTRAP, &action, nullptr);
  mprotect(table_start, table_bytes, PROT_READ);
}

// Returns whether the process came as far as this write.
bool kill_at_write(int write, bool is_behind) {
  PoolSetup setup(kNumChunks);
  pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setup.table.reset();
    stop_at = write, stops_behind = is_behind;
    live(setup, protect_table);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(pid, &status, WUNTRACED) == pid);
  if (WIFSTOPPED(status)) {
    TableUsage before = setup.usage();
    CHECK(setup.table->reclaim(is_certainly_dead) == 0 && setup.usage().num_free == before.num_free);
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    check_all_free(setup);
    return true;
  }
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0 && setup.usage().num_free == kNumChunks);
  return false;
}

#endif

// Returns whether the process came as far as this stop: system calls stop twice, when they begin and when they end.
bool kill_at_stop(int stop) {
  PoolSetup setup(kNumChunks);
  pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    live(setup, [] { raise(SIGSTOP); });
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status));
  for (int i = 0; i < stop; ++i) {
    CHECK(ptrace(PTRACE_SYSCALL, pid, nullptr, nullptr) == 0);
    CHECK(waitpid(pid, &status, 0) == pid);
    if (!WIFSTOPPED(status)) {
      CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0 && setup.usage().num_free == kNumChunks);
      return false;
    }
  }
  CHECK(setup.table->reclaim(is_certainly_dead) == 0);
  kill(pid, SIGKILL);
  CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
  check_all_free(setup);
  return true;
}

// Writes its pid all over what it holds, and looks that nobody else writes there.
[[noreturn]] void work_for_ever(const PoolSetup& setup) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that fails leaves nobody behind
  Side side(setup, self());
  std::minstd_rand random(static_cast<unsigned>(getpid()));
  for (;;) {
    size_t num_chunks = 1 + random() % 4;
    unsigned char* block = side.block_or_null(num_chunks);
    if (block == nullptr) continue;
    auto* words = reinterpret_cast<volatile uint64_t*>(block);
    auto stamp = static_cast<uint64_t>(getpid());
    for (int round = 0; round < 3; ++round) {
      for (size_t i = 0; i < num_chunks * kChunk / 8; i += 512) words[i] = stamp;
      for (size_t i = 0; i < num_chunks * kChunk / 8; i += 512) {
        if (words[i] != stamp) _exit(77);
      }
      uint64_t bytes = 0;
      static_cast<void>(side.memory.pause({side.arena}, &bytes));
      while (!side.memory.resume({side.arena}, &bytes).ok()) {
      }
    }
    static_cast<void>(side.memory.release(reinterpret_cast<uintptr_t>(block)));
  }
}

}  // namespace

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST(a_kill_at_any_write_to_the_table_gives_every_chunk_back) {
  int write = 1;
  while (kill_at_write(write, false)) {
    CHECK(kill_at_write(write, true));
    ++write;
  }
  CHECK(write > 20);
  std::printf("  %d writes\n", write - 1);
}
#endif

TEST(a_kill_at_any_system_call_gives_every_chunk_back) {
  int stop = 0;
  while (kill_at_stop(stop)) ++stop;
  CHECK(stop > 50);
  std::printf("  %d stops\n", stop);
}

TEST(random_kills_lose_no_chunk_and_lend_none_twice) {
  PoolSetup setup(kNumChunks);
  std::minstd_rand random(1);
  std::vector<pid_t> workers(4, 0);
  for (int kills = 0; kills < 200; ++kills) {
    for (pid_t& worker : workers) {
      if (worker == 0 && (worker = fork()) == 0) work_for_ever(setup);
    }
    usleep(random() % 3000);
    pid_t& victim = workers[random() % workers.size()];
    kill(victim, SIGKILL);
    int status = 0;
    CHECK(waitpid(victim, &status, 0) == victim && WIFSIGNALED(status));
    victim = 0;
    setup.table->reclaim(is_certainly_dead);
  }
  for (pid_t worker : workers) {
    int status = 0;
    if (worker == 0) continue;
    kill(worker, SIGKILL);
    CHECK(waitpid(worker, &status, 0) == worker && WIFSIGNALED(status));
  }
  check_all_free(setup);
}
