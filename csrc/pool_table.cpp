#include "pool_table.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

namespace tasuki {
namespace {

constexpr uint64_t kMagic = 0x326c6f6f70616b75;  // "ukapool2"
constexpr size_t kHeaderBytes = 4096;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// A word: 38 bits of start (87 years at 100 ticks a second), 22 of pid (Linux's largest), 4 of state. 0 is free.
constexpr uint64_t kLent = 1, kMapped = 2, kPublished = 4, kStates = 15;
constexpr int kPidShift = 4, kStartShift = 26;
constexpr uint64_t kMaxPid = (uint64_t{1} << 22) - 1, kMaxStart = (uint64_t{1} << 38) - 1;

uint64_t word_of(const Owner& owner) { return owner.start << kStartShift | uint64_t{owner.pid} << kPidShift; }

Owner owner_of(uint64_t word) { return {static_cast<uint32_t>(word >> kPidShift & kMaxPid), word >> kStartShift}; }

Status os_failure(const char* call) {
  int error = errno;
  Code code = error == EMFILE || error == ENFILE ? Code::fd_limit : error == ENOMEM ? Code::out_of_memory : Code::driver;
  return failure(code, std::string(call) + ": " + std::strerror(error));
}

}  // namespace

struct PoolTable::Header {
  uint64_t magic;
  uint64_t id;
  uint64_t num_chunks;
  uint64_t chunk_bytes;
};

Status PoolTable::make(size_t num_chunks, size_t chunk_bytes, int* fd) {
  if (num_chunks == 0 || num_chunks > kMaxChunks) {
    return failure(Code::bad_argument, "num_chunks: " + std::to_string(num_chunks) + " is not in 1 to " + std::to_string(kMaxChunks));
  }
  uint64_t id = 0;
  while (id == 0) {
    if (getrandom(&id, sizeof id, 0) < 0 && errno != EINTR) return os_failure("getrandom");
  }
  int made = memfd_create("tasuki-pool-table", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made < 0) return os_failure("memfd_create");
  Header header{kMagic, id, num_chunks, chunk_bytes};
  bool is_made = ftruncate(made, static_cast<off_t>(kHeaderBytes + num_chunks * sizeof(Row))) == 0 &&
                 pwrite(made, &header, sizeof header, 0) == sizeof header && fcntl(made, F_ADD_SEALS, kSeals) == 0;
  if (!is_made) {
    Status status = os_failure("making a pool's table");
    return close(made), status;
  }
  *fd = made;
  return {};
}

Status PoolTable::open(int fd, std::unique_ptr<PoolTable>* table) {
  struct stat file;
  if (fstat(fd, &file) != 0) return failure(Code::bad_handle, "the pool's table is not an open descriptor");
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return failure(Code::bad_handle, "the pool's table is not a sealed memfd");
  Header header{};
  bool is_read = pread(fd, &header, sizeof header, 0) == sizeof header;
  bool has_form = is_read && header.magic == kMagic && header.id != 0 && header.num_chunks != 0 && header.num_chunks <= kMaxChunks && header.chunk_bytes != 0;
  size_t bytes = kHeaderBytes + (has_form ? header.num_chunks * sizeof(Row) : 0);
  if (!has_form || static_cast<size_t>(file.st_size) != bytes) return failure(Code::bad_handle, "this is no table of a pool");
  void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (start == MAP_FAILED) return os_failure("mmap of a pool's table");
  table->reset(new PoolTable(start, bytes));
  return {};
}

PoolTable::PoolTable(void* start, size_t bytes) : start_(start), bytes_(bytes) {
  auto* header = static_cast<Header*>(start);
  id_ = header->id;
  num_chunks_ = header->num_chunks;
  chunk_bytes_ = header->chunk_bytes;
  rows_ = reinterpret_cast<Row*>(static_cast<char*>(start) + kHeaderBytes);
}

PoolTable::~PoolTable() { munmap(start_, bytes_); }

// Sequentially consistent: `take_at` and `add_reader` each write one word and then read the other's.
bool PoolTable::take(const Owner& owner, size_t* index) {
  for (size_t i = 0; i < num_chunks_; ++i) {
    if (take_at(owner, i)) return *index = i, true;
  }
  return false;
}

bool PoolTable::take_at(const Owner& owner, size_t index) {
  if (index >= num_chunks_ || has_readers(index)) return false;
  uint64_t free = 0;
  if (!rows_[index].owner.compare_exchange_strong(free, word_of(owner) | kLent)) return false;
  // A reader that arrives meanwhile either sees that the chunk is not published, or is seen here.
  if (!has_readers(index)) return true;
  rows_[index].owner = 0;
  return false;
}

bool PoolTable::begin_map(const Owner& owner, size_t index) {
  return move(owner, index, kLent, kLent | kMapped) || move(owner, index, kLent | kPublished, kLent | kPublished | kMapped);
}

bool PoolTable::end_map(const Owner& owner, size_t index) {
  return move(owner, index, kLent | kMapped, kLent) || move(owner, index, kLent | kPublished | kMapped, kLent | kPublished);
}

bool PoolTable::publish(const Owner& owner, size_t index) {
  if (index >= num_chunks_) return false;
  uint64_t now = rows_[index].owner;
  bool is_ours = now != 0 && (now & ~kStates) == word_of(owner);
  return is_ours && rows_[index].owner.compare_exchange_strong(now, now | kPublished);
}

bool PoolTable::give_back(const Owner& owner, size_t index) {
  if (index >= num_chunks_) return false;
  uint64_t lent = word_of(owner) | kLent, published = lent | kPublished;
  return rows_[index].owner.compare_exchange_strong(lent, 0) || rows_[index].owner.compare_exchange_strong(published, 0);
}

Status PoolTable::add_reader(const Owner& reader, size_t index) {
  if (index >= num_chunks_) return failure(Code::bad_argument, "index: beyond the pool");
  Row& row = rows_[index];
  for (Word& slot : row.readers) {
    uint64_t none = 0;
    if (!slot.compare_exchange_strong(none, word_of(reader))) continue;
    if ((row.owner & kPublished) != 0) return {};
    slot = 0;
    return failure(Code::bad_handle, "chunk " + std::to_string(index) + " of the pool is not published: its owner has given it back");
  }
  return failure(Code::busy, "chunk " + std::to_string(index) + " of the pool has " + std::to_string(kMaxReaders) + " readers already");
}

void PoolTable::remove_reader(const Owner& reader, size_t index) {
  for (Word& slot : rows_[index].readers) {
    uint64_t ours = word_of(reader);
    if (slot.compare_exchange_strong(ours, 0)) return;
  }
}

size_t PoolTable::reclaim(const std::function<bool(const Owner&)>& is_dead) {
  std::map<uint64_t, bool> answers;
  auto is_of_dead = [&](uint64_t word) {
    if (word == 0) return false;
    auto [answer, is_new] = answers.try_emplace(word & ~kStates, false);
    if (is_new) answer->second = is_dead(owner_of(word));
    return answer->second;
  };
  size_t num_freed = 0;
  for (size_t i = 0; i < num_chunks_; ++i) {
    for (Word& slot : rows_[i].readers) {
      uint64_t reader = slot;
      // Dead processes change nothing, so only another reclaim can have been faster.
      if (is_of_dead(reader)) num_freed += slot.compare_exchange_strong(reader, 0);
    }
    uint64_t owner = rows_[i].owner;
    if (is_of_dead(owner)) num_freed += rows_[i].owner.compare_exchange_strong(owner, 0);
  }
  return num_freed;
}

TableUsage PoolTable::usage() const {
  TableUsage usage;
  for (size_t i = 0; i < num_chunks_; ++i) {
    uint64_t owner = rows_[i].owner;
    bool is_read = has_readers(i);
    usage.num_free += owner == 0 && !is_read;
    usage.num_lent += (owner & (kLent | kMapped)) == kLent;
    usage.num_mapped += (owner & kMapped) != 0;
    usage.num_published += (owner & kPublished) != 0;
    usage.num_read += is_read;
  }
  return usage;
}

bool PoolTable::move(const Owner& owner, size_t index, uint64_t from, uint64_t to) {
  if (index >= num_chunks_) return false;
  uint64_t expected = word_of(owner) | from;
  return rows_[index].owner.compare_exchange_strong(expected, word_of(owner) | to);
}

bool PoolTable::has_readers(size_t index) const {
  const auto& readers = rows_[index].readers;
  return std::any_of(std::begin(readers), std::end(readers), [](const Word& slot) { return slot != 0; });
}

Status identify(uint32_t pid, Owner* owner) {
  FILE* file = std::fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "re");
  if (file == nullptr) return errno == ENOENT ? failure(Code::not_found, "no process has pid " + std::to_string(pid)) : os_failure("/proc");
  char line[1024];
  size_t length = std::fread(line, 1, sizeof line - 1, file);
  std::fclose(file);
  line[length] = 0;
  if (length == 0) return failure(Code::not_found, "pid " + std::to_string(pid) + " has just ended");
  // The name in parentheses may contain anything; the start is the 20th word after it.
  const char* at = std::strrchr(line, ')');
  for (int i = 0; at != nullptr && i < 20; ++i) at = std::strchr(at + 1, ' ');
  unsigned long long start = 0;
  if (at == nullptr || std::sscanf(at, "%llu", &start) != 1) return failure(Code::driver, "/proc/<pid>/stat: not of the expected form");
  if (pid > kMaxPid || start > kMaxStart) return failure(Code::bad_argument, "pid, start: larger than a table's words hold");
  *owner = {pid, start};
  return {};
}

bool is_certainly_dead(const Owner& owner) {
  // A pidfd becomes readable once the last thread has ended, after the kernel has freed the process's memory.
  int fd = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(owner.pid), 0));
  if (fd < 0 && errno == ESRCH) return true;
  pollfd ended{fd, POLLIN, 0};
  bool has_ended = fd >= 0 && poll(&ended, 1, 0) == 1;
  if (fd >= 0) close(fd);
  if (has_ended) return true;
  // Another process now has the pid, so the first was reaped. Any other failure proves nothing.
  Owner now;
  Status status = identify(owner.pid, &now);
  return status.ok() ? now.start != owner.start : status.code == Code::not_found;
}

}  // namespace tasuki
