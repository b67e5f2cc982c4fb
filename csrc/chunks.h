// The physical side of an arena: large chunks, contiguous from offset 0, each absent, kept (memory, not mapped) or mapped.
#pragma once

#include <vector>

#include "blocks.h"
#include "driver.h"
#include "share.h"

namespace tasuki {

struct ChunkSizes {
  size_t min_bytes;
  size_t max_bytes;
};

struct Chunk {
  Range range;
  Physical physical = 0;
  uint64_t serial = 0;  // of this physical memory; changes when a chunk is released and created again
  bool is_mapped = false;
};

class Chunks {
 public:
  using Indices = std::vector<size_t>;

  Chunks(Driver& driver, int device, uintptr_t base, ChunkSizes sizes, Exports& exports);

  // Adds absent chunks until offset `end` is covered; `grow_ahead` makes them larger than requested, to keep them few.
  void extend(size_t end, bool grow_ahead);
  // Reverts that, except for chunks that hold memory.
  void shrink(size_t num_chunks);

  // Each of these is all or nothing.
  Status create(const Indices& indices);
  Status map(const Indices& indices);
  // A failure maps the unmapped chunks again; if that fails too, the arena is broken.
  Status unmap(const Indices& indices);
  // Chunks that could not be released stay kept. `given_back` counts what no peer keeps alive.
  Status release(const Indices& indices, uint64_t* given_back);

  Indices mapped() const;
  Indices kept() const;
  // Chunks without memory, or not mapped, that hold a part of a needed block; and mapped chunks that hold none.
  Indices absent_in(const Blocks& blocks) const;
  Indices unmapped_in(const Blocks& blocks) const;
  Indices overlapping(const Range& range) const;

  uint64_t bytes_of(const Indices& indices) const;
  uint64_t bytes_in(const Blocks& blocks) const;
  const Chunk& at(size_t index) const { return chunks_[index]; }
  size_t size() const { return chunks_.size(); }
  bool is_broken() const { return is_broken_; }

 private:
  std::vector<Range> runs(const Indices& indices) const;
  Status map_one(size_t index);
  Status allow_runs(const Indices& indices);

  Driver& driver_;
  int device_;
  uintptr_t base_;
  ChunkSizes sizes_;
  Exports& exports_;
  std::vector<Chunk> chunks_;
  bool is_broken_ = false;
};

}  // namespace tasuki
