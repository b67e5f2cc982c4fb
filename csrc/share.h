// Chunks shared between processes: exports that peers may still hold, and imports.
#pragma once

#include <sys/types.h>

#include <map>
#include <vector>

#include "driver.h"

namespace tasuki {

// Chunks imported from their descriptors by this process so far.
uint64_t num_imported_chunks();

// Exported chunks by serial number. A chunk released while an export of it is open may still be held by the peer.
class Exports {
 public:
  struct Piece {
    uint64_t serial;
    uint64_t bytes;
  };

  uint64_t open(uint64_t arena, std::vector<Piece> pieces);
  // False if there is no such export.
  bool close(uint64_t id);
  // Whether a peer may keep the chunk alive; records that we released it.
  bool released(uint64_t serial);

  uint64_t exported_bytes(uint64_t arena) const;
  // Released by us, kept alive by peers.
  uint64_t held_bytes(uint64_t arena) const;
  size_t num_open() const { return exports_.size(); }

 private:
  struct Export {
    uint64_t arena;
    std::vector<Piece> pieces;
  };
  struct Chunk {
    uint64_t arena;
    uint64_t bytes;
    int num_exports;
    bool is_released;
  };

  std::map<uint64_t, Export> exports_;
  std::map<uint64_t, Chunk> chunks_;  // by serial
  uint64_t last_id_ = 0;
};

// A peer's chunks, mapped here with the peer's offsets. Its addresses stay when the chunks are released. So do the handles and the
// read-only mappings of a pool's chunks, whose memory lives as long as the pool: each is imported once, and mapped again only where the
// peer has other chunks than before. If handles take descriptors, only those of the last renewal stay.
class Import {
 public:
  static Status open(Driver& driver, int device, Access access, const std::vector<SharedChunk>& chunks, std::unique_ptr<Import>* import);
  ~Import();
  Import(const Import&) = delete;
  Import& operator=(const Import&) = delete;

  Status unmap();
  // Ends reading, and unmaps memory that is not a pool's; the addresses stay reserved. Idempotent.
  Status release();
  // After a release: maps the peer's present chunks at the same addresses, unless they are there. If it fails, nothing is mapped.
  Status renew(const std::vector<SharedChunk>& chunks);
  uintptr_t base() const { return base_; }
  uint64_t bytes() const;
  const Driver& driver() const { return driver_; }

 private:
  struct Piece {
    uint64_t offset;
    uint64_t bytes;
    PoolPlace place;
    Physical physical;
    bool is_kept;  // in `kept_`
  };
  struct Kept {
    Physical physical;
    uint64_t bytes;
    uint64_t identity;  // see Driver::identify; 0 if descriptors do not reveal it
  };

  Import(Driver& driver, int device, Access access) : driver_(driver), device_(device), access_(access) {}
  Status import_chunks(const std::vector<SharedChunk>& chunks);
  Status import_one(const SharedChunk& chunk, Piece* piece);
  Status release_unused();
  Status reuse(const SharedChunk& chunk, const Kept& kept, Piece* piece);
  // Unmaps what is not read any more, and maps what is not mapped yet.
  Status map();
  Status map_missing();
  void forget_in_child();
  Status unmap_pieces(const std::vector<Piece>& pieces);

  Driver& driver_;
  int device_;
  Access access_;
  uintptr_t base_ = 0;
  size_t span_bytes_ = 0;
  std::vector<Piece> pieces_;  // being read
  std::vector<Piece> mapped_;  // by offset, like `pieces_`
  pid_t mapped_by_ = 0;
  std::map<PoolPlace, Kept> kept_;
};

}  // namespace tasuki
