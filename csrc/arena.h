// One tag on one device: fixed addresses whose memory can be paused and resumed. Not locked: memory.h has the only mutex.
//
// Pause and resume are split into steps with undo, since several arenas move together or not at all.
#pragma once

#include <memory>
#include <string>

#include "blocks.h"
#include "chunks.h"
#include "driver.h"
#include "host_copy.h"

namespace tasuki {

enum class State { resident, paused, resuming };

struct PausePolicy {
  bool keep_content = false;  // in pinned host memory
  bool keep_chunks = false;   // unmap, but keep the physical memory
};

struct ArenaOptions {
  size_t capacity_bytes = 0;   // 0: twice the device's memory
  size_t min_chunk_bytes = 0;  // 0: 64 MiB
  size_t max_chunk_bytes = 0;  // 0: 1 GiB
};

struct Usage {
  State state;
  uint64_t used_bytes;         // in blocks
  uint64_t total_bytes;        // of the chunks that hold blocks, which a resume maps
  uint64_t mapped_bytes;
  uint64_t kept_bytes;         // physical memory that is not mapped
  uint64_t host_copy_bytes;    // pinned
  uint64_t exported_bytes;     // in open exports
  uint64_t held_bytes;         // released by us, kept alive by a peer
  uint64_t num_chunks;
  uint64_t num_blocks;
};

class Arena {
 public:
  static Status make(Driver& driver, std::string tag, int device, ArenaOptions options, uint64_t id, Exports& exports,
                     std::unique_ptr<Arena>* arena);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  Status allocate(size_t bytes, uintptr_t* address);
  Status release(uintptr_t address);
  // Promises that the bytes at `address` stay constant until their block is released: a pause then saves them once.
  void freeze(uintptr_t address, size_t bytes) { frozen_.add({address - base_, bytes}); }
  bool contains(uintptr_t address) const { return address >= base_ && address - base_ < capacity_; }

  // Pause, in this order. A failed step leaves the arena unchanged.
  Status begin_save();  // starts the copy to the host
  // Its copies have arrived: frozen bytes need no other.
  void end_save() { host_copy_.keep(frozen_); }
  bool has_saved_frozen() const { return host_copy_.keeps(frozen_); }
  // Starts undoing writes to frozen bytes that were saved; a resume does the same.
  Status restore_frozen() { return host_copy_.restore_constant(base_); }
  // Host memory that a save lacks, now or once it has `total_bytes`; and what was pinned for it.
  size_t missing_host_bytes(size_t total_bytes) const { return host_copy_.missing_bytes(blocks_.runs(), total_bytes); }
  void adopt_host(void* host, size_t bytes) { host_copy_.adopt(host, bytes); }
  Status unmap();
  Status map_again();  // the undo of unmap
  // Releases memory; content that was not saved is lost.
  Status commit_pause(uint64_t* given_back);
  // Releases chunks that a pause has kept.
  Status release_kept(uint64_t* given_back);

  // Resume, in this order; undo_resume reverts what was done.
  Status create_missing();
  Status map(uint64_t* mapped_bytes);
  Status begin_restore(const HostCopy::Reached& reached);
  Status undo_resume();
  void commit_resume();

  Status export_chunks(Access access, std::vector<SharedChunk>* chunks, std::vector<Exports::Piece>* pieces) const;

  uint64_t missing_bytes() const { return chunks_.bytes_of(chunks_.absent_in(blocks_)); }
  uint64_t created_bytes() const { return chunks_.bytes_of(created_); }
  Usage usage() const;
  Status check_whole() const;  // poisoned, or ok
  bool has_saved_content() const { return has_saved_content_; }

  const std::string& tag() const { return tag_; }
  Driver& driver() const { return driver_; }
  int device() const { return device_; }
  uint64_t id() const { return id_; }
  uintptr_t base() const { return base_; }
  size_t num_blocks() const { return blocks_.num_blocks(); }

  State state = State::resident;
  PausePolicy policy;
  uint64_t ticket = 0;  // of the running transfer

 private:
  Arena(Driver& driver, std::string tag, int device, uint64_t id, uintptr_t base, size_t capacity, ChunkSizes sizes, Exports& exports);
  Status back_with_memory(const Range& block);
  // needed_bytes: of the additional chunks, whole.
  Status back_exactly(const Range& block, bool grow_ahead, size_t* needed_bytes);
  void trim(const Range& block);

  Driver& driver_;
  std::string tag_;
  int device_;
  uint64_t id_;
  uintptr_t base_;
  size_t capacity_;
  Blocks blocks_;
  Exports& exports_;
  Chunks chunks_;
  HostCopy host_copy_;
  size_t max_chunk_bytes_;
  Chunks::Indices created_;   // by the running resume
  Chunks::Indices mapped_;    // by the running resume
  Chunks::Indices unmapped_;  // by the running pause
  Ranges frozen_;
  bool has_saved_content_ = false;
};

}  // namespace tasuki
