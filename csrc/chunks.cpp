#include "chunks.h"

#include <algorithm>
#include <atomic>

namespace tasuki {
namespace {

std::atomic<uint64_t> last_serial{0};

size_t rounded_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

// Chunks created ahead are this fraction of the arena, which bounds waste; 100 GiB take about a hundred chunks.
constexpr size_t kGrowthPart = 8;

}  // namespace

Chunks::Chunks(Driver& driver, int device, uintptr_t base, ChunkSizes sizes, Exports& exports)
    : driver_(driver), device_(device), base_(base), sizes_(sizes), exports_(exports) {}

void Chunks::extend(size_t end, bool grow_ahead) {
  size_t start = chunks_.empty() ? 0 : chunks_.back().range.end();
  while (start < end) {
    size_t wanted = grow_ahead ? std::max(end - start, start / kGrowthPart) : end - start;
    Chunk chunk;
    chunk.range = {start, std::min(rounded_up(wanted, sizes_.min_bytes), sizes_.max_bytes)};
    chunks_.push_back(chunk);
    start = chunk.range.end();
  }
}

void Chunks::shrink(size_t num_chunks) {
  while (chunks_.size() > num_chunks && chunks_.back().physical == 0) chunks_.pop_back();
}

Status Chunks::create(const Indices& indices) {
  Indices created;
  Status status;
  for (size_t index : indices) {
    Chunk& chunk = chunks_[index];
    if (chunk.physical != 0) continue;
    status = driver_.create(device_, chunk.range.bytes, &chunk.physical);
    if (!status.ok()) break;
    chunk.serial = ++last_serial;
    created.push_back(index);
  }
  uint64_t given_back = 0;
  if (!status.ok()) static_cast<void>(release(created, &given_back));
  return status;
}

Status Chunks::map(const Indices& indices) {
  Status status;
  for (size_t index : indices) {
    status = map_one(index);
    if (!status.ok()) break;
  }
  if (status.ok()) status = allow_runs(indices);
  if (status.ok()) return {};
  for (size_t index : indices) {
    Chunk& chunk = chunks_[index];
    if (chunk.is_mapped && !driver_.unmap(base_ + chunk.range.offset, chunk.range.bytes).ok()) is_broken_ = true;
    chunk.is_mapped = false;
  }
  return status;
}

Status Chunks::unmap(const Indices& indices) {
  std::vector<Range> done;
  for (const Range& run : runs(indices)) {
    Status status = driver_.unmap(base_ + run.offset, run.bytes);
    if (status.ok()) {
      done.push_back(run);
      continue;
    }
    for (const Range& undo : done) {
      Indices again = overlapping(undo);
      for (size_t index : again) chunks_[index].is_mapped = false;
      if (!map(again).ok()) is_broken_ = true;
    }
    return status;
  }
  for (size_t index : indices) chunks_[index].is_mapped = false;
  return {};
}

Status Chunks::release(const Indices& indices, uint64_t* given_back) {
  Status first;
  for (size_t index : indices) {
    Chunk& chunk = chunks_[index];
    Status status = driver_.release(chunk.physical);
    if (!status.ok()) {
      if (first.ok()) first = status;
      continue;
    }
    chunk.physical = 0;
    if (!exports_.released(chunk.serial)) *given_back += chunk.range.bytes;
  }
  return first;
}

Chunks::Indices Chunks::mapped() const {
  Indices indices;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    if (chunks_[i].is_mapped) indices.push_back(i);
  }
  return indices;
}

Chunks::Indices Chunks::kept() const {
  Indices indices;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    if (chunks_[i].physical != 0 && !chunks_[i].is_mapped) indices.push_back(i);
  }
  return indices;
}

Chunks::Indices Chunks::absent_in(const Blocks& blocks) const {
  Indices indices;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    if (chunks_[i].physical == 0 && blocks.is_in_use(chunks_[i].range)) indices.push_back(i);
  }
  return indices;
}

Chunks::Indices Chunks::unmapped_in(const Blocks& blocks) const {
  Indices indices;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    if (!chunks_[i].is_mapped && blocks.is_in_use(chunks_[i].range)) indices.push_back(i);
  }
  return indices;
}

Chunks::Indices Chunks::overlapping(const Range& range) const {
  auto ends_after = [](size_t offset, const Chunk& chunk) { return offset < chunk.range.end(); };
  auto first = std::upper_bound(chunks_.begin(), chunks_.end(), range.offset, ends_after);
  Indices indices;
  for (auto chunk = first; chunk != chunks_.end() && chunk->range.offset < range.end(); ++chunk) {
    indices.push_back(static_cast<size_t>(chunk - chunks_.begin()));
  }
  return indices;
}

uint64_t Chunks::bytes_of(const Indices& indices) const {
  uint64_t bytes = 0;
  for (size_t index : indices) bytes += chunks_[index].range.bytes;
  return bytes;
}

uint64_t Chunks::bytes_in(const Blocks& blocks) const {
  uint64_t bytes = 0;
  for (const Chunk& chunk : chunks_) bytes += blocks.is_in_use(chunk.range) ? chunk.range.bytes : 0;
  return bytes;
}

std::vector<Range> Chunks::runs(const Indices& indices) const {
  std::vector<Range> runs;
  for (size_t index : indices) {
    const Range& range = chunks_[index].range;
    if (!runs.empty() && runs.back().end() == range.offset) {
      runs.back().bytes += range.bytes;
    } else {
      runs.push_back(range);
    }
  }
  return runs;
}

Status Chunks::map_one(size_t index) {
  Chunk& chunk = chunks_[index];
  Status status = driver_.map(base_ + chunk.range.offset, chunk.range.bytes, chunk.physical);
  if (status.ok()) chunk.is_mapped = true;
  return status;
}

Status Chunks::allow_runs(const Indices& indices) {
  // One call for adjacent chunks: access is granted per range, and this is the expensive call.
  for (const Range& run : runs(indices)) {
    Status status = driver_.allow(base_ + run.offset, run.bytes, device_, Access::read_write);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace tasuki
