// Holders of a pool's chunks: words in shared memory mapped by every process of the node. Lock-free: each transition is one atomic
// word, so a process killed at any instruction leaves the table consistent.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "status.h"

namespace tasuki {

// A process, unique until the machine reboots: its pid and its start, in clock ticks of /proc/<pid>/stat.
struct Owner {
  uint32_t pid = 0;
  uint64_t start = 0;
};

struct TableUsage {
  uint64_t num_free = 0;
  uint64_t num_lent = 0;       // taken, not mapped
  uint64_t num_mapped = 0;     // for writing, by their owner
  uint64_t num_published = 0;  // of those two, readable by others
  uint64_t num_read = 0;       // with readers, whoever the owner is
};

// Mapped shared memory of a sealed memfd.
class PoolTable {
 public:
  static constexpr size_t kMaxReaders = 15;
  static constexpr size_t kMaxChunks = 65536;

  // For chunks that are all free. The caller owns the descriptor.
  static Status make(size_t num_chunks, size_t chunk_bytes, int* fd);
  // Refuses anything not created by `make`.
  static Status open(int fd, std::unique_ptr<PoolTable>* table);
  ~PoolTable();
  PoolTable(const PoolTable&) = delete;
  PoolTable& operator=(const PoolTable&) = delete;

  // Random, so unique until the machine reboots; never 0.
  uint64_t id() const { return id_; }
  size_t num_chunks() const { return num_chunks_; }
  size_t chunk_bytes() const { return chunk_bytes_; }

  // Lends the lowest chunk without owner or readers. False if there is none.
  bool take(const Owner& owner, size_t* index);
  // Lends this one. False if it has an owner or readers.
  bool take_at(const Owner& owner, size_t index);
  // Before the owner maps it for writing, or after it unmapped it. False, with nothing changed, unless `owner` holds it in that state.
  bool begin_map(const Owner& owner, size_t index);
  bool end_map(const Owner& owner, size_t index);
  // Makes it readable by others until it is returned.
  bool publish(const Owner& owner, size_t index);
  // False while it is mapped.
  bool give_back(const Owner& owner, size_t index);

  // To be called before reading and afterwards; a read-only mapping may stay. A chunk with readers is not lent, even if its owner has
  // returned it or is gone. Busy with kMaxReaders readers; bad_handle if it is not published.
  Status add_reader(const Owner& reader, size_t index);
  void remove_reader(const Owner& reader, size_t index);

  // Frees what dead processes hold. Returns the number of chunks and readers. Any process may call it, even concurrently.
  size_t reclaim(const std::function<bool(const Owner&)>& is_dead);

  TableUsage usage() const;

 private:
  using Word = std::atomic<uint64_t>;
  static_assert(Word::is_always_lock_free && sizeof(Word) == 8);
  // Two cache lines per chunk.
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
  uint64_t id_;
  size_t num_chunks_;
  size_t chunk_bytes_;
  Row* rows_;
};

// Whether the kernel has ended all threads of the process and so removed its mappings: not for a stopped one or a zombie with threads.
bool is_certainly_dead(const Owner& owner);
// For a living process; not_found otherwise.
Status identify(uint32_t pid, Owner* owner);

}  // namespace tasuki
