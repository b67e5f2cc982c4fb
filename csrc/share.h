// Chunks shared between processes: exports that peers may still hold, and imports.
#pragma once

#include <map>
#include <vector>

#include "driver.h"

namespace tasuki {

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

// A peer's chunks, mapped here with the peer's offsets. Its addresses stay when the chunks are released.
class Import {
 public:
  static Status open(Driver& driver, int device, Access access, const std::vector<SharedChunk>& chunks, std::unique_ptr<Import>* import);
  ~Import();
  Import(const Import&) = delete;
  Import& operator=(const Import&) = delete;

  Status unmap();
  // Unmaps the peer's memory; the addresses stay reserved. Idempotent.
  Status release();
  // After a release: maps the peer's present chunks at the same addresses. If it fails, nothing is mapped.
  Status renew(const std::vector<SharedChunk>& chunks);
  uintptr_t base() const { return base_; }
  uint64_t bytes() const;

 private:
  struct Piece {
    uint64_t offset;
    uint64_t bytes;
    Physical physical;
  };

  Import(Driver& driver, int device, Access access) : driver_(driver), device_(device), access_(access) {}
  Status import_chunks(const std::vector<SharedChunk>& chunks);
  Status map();
  // Maps the first pieces, or none.
  Status map_first(size_t num_pieces);

  Driver& driver_;
  int device_;
  Access access_;
  uintptr_t base_ = 0;
  size_t span_bytes_ = 0;
  std::vector<Piece> pieces_;
  bool is_mapped_ = false;
};

}  // namespace tasuki
