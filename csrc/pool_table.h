// Who holds each chunk of a pool: words in shared memory that every process of the node maps. No lock: each transition is one atomic
// word, so a process that is killed at any instruction leaves the table whole.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "status.h"

namespace tasuki {

// A process for as long as the machine runs: its pid and when it started, in the clock ticks of /proc/<pid>/stat.
struct Owner {
  uint32_t pid = 0;
  uint64_t start = 0;
};

struct TableUsage {
  uint64_t num_free = 0;
  uint64_t num_lent = 0;       // taken, and mapped by nobody
  uint64_t num_mapped = 0;     // for writing, by their owner
  uint64_t num_published = 0;  // of those two, what others may read
  uint64_t num_read = 0;       // mapped by readers, whoever owns them now
};

// Mapped shared memory of a sealed memfd.
class PoolTable {
 public:
  static constexpr size_t kMaxReaders = 15;
  static constexpr size_t kMaxChunks = 65536;

  // Of chunks that are all free. The descriptor belongs to the caller.
  static Status make(size_t num_chunks, size_t chunk_bytes, int* fd);
  // Refuses what no `make` has made.
  static Status open(int fd, std::unique_ptr<PoolTable>* table);
  ~PoolTable();
  PoolTable(const PoolTable&) = delete;
  PoolTable& operator=(const PoolTable&) = delete;

  size_t num_chunks() const { return num_chunks_; }
  size_t chunk_bytes() const { return chunk_bytes_; }

  // Lends the lowest chunk that nobody owns or reads. False when there is none.
  bool take(const Owner& owner, size_t* index);
  // The owner is about to map it for writing, or has unmapped it. False when `owner` holds it in no such state, and nothing has changed.
  bool begin_map(const Owner& owner, size_t index);
  bool end_map(const Owner& owner, size_t index);
  // Others may read it from now on, until it is given back.
  bool publish(const Owner& owner, size_t index);
  // False while it is mapped.
  bool give_back(const Owner& owner, size_t index);

  // To be called before mapping read-only, and after unmapping. A chunk with readers is lent to nobody, also when its owner has given it
  // back or is gone. Busy when it has kMaxReaders; bad_handle when it is not published.
  Status add_reader(const Owner& reader, size_t index);
  void remove_reader(const Owner& reader, size_t index);

  // Frees what belongs to the dead. Returns how many chunks and readers that were. Any process may call it, several at once.
  size_t reclaim(const std::function<bool(const Owner&)>& is_dead);

  TableUsage usage() const;

 private:
  using Word = std::atomic<uint64_t>;
  static_assert(Word::is_always_lock_free && sizeof(Word) == 8);
  // Two cache lines a chunk.
  struct Row {
    Word owner;
    Word readers[kMaxReaders];
  };
  struct Header;

  PoolTable(void* start, size_t bytes);
  bool move(const Owner& owner, size_t index, uint64_t from, uint64_t to);
  bool has_readers(size_t index) const;

  void* start_;
  size_t bytes_;
  size_t num_chunks_;
  size_t chunk_bytes_;
  Row* rows_;
};

// Whether the kernel has ended every thread of the process, and so taken its mappings: not while it is stopped, or a zombie with threads.
bool is_certainly_dead(const Owner& owner);
// Of a process that lives; not_found when it does not.
Status identify(uint32_t pid, Owner* owner);

}  // namespace tasuki
