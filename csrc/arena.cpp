#include "arena.h"

#include <unistd.h>

#include <utility>

namespace tasuki {
namespace {

// 64 GiB cost 460 ms to create in 2 MiB chunks and 1.7 ms in 1 GiB chunks (H200). Small arenas start smaller to waste little.
constexpr size_t kMinChunk = size_t{64} << 20;
constexpr size_t kMaxChunk = size_t{1} << 30;

size_t rounded_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

}  // namespace

Status Arena::make(Driver& driver, std::string tag, int device, ArenaOptions options, uint64_t id, Exports& exports,
                   std::unique_ptr<Arena>* arena) {
  size_t step = 0, free_bytes = 0, total_bytes = 0;
  Status status = driver.granularity(device, &step);
  if (status.ok()) status = driver.room(device, &free_bytes, &total_bytes);
  if (!status.ok()) return status;
  ChunkSizes sizes{rounded_up(options.min_chunk_bytes != 0 ? options.min_chunk_bytes : kMinChunk, step),
                   rounded_up(options.max_chunk_bytes != 0 ? options.max_chunk_bytes : kMaxChunk, step)};
  if (sizes.min_bytes > sizes.max_bytes) return failure(Code::bad_argument, "min_chunk_bytes: larger than max_chunk_bytes");
  size_t capacity = rounded_up(options.capacity_bytes != 0 ? options.capacity_bytes : 2 * total_bytes, sizes.max_bytes);
  uintptr_t base = 0;
  // One more chunk than blocks may use: the last chunk extends beyond the last block.
  status = driver.reserve(device, capacity + sizes.max_bytes, &base);
  if (!status.ok()) return status;
  arena->reset(new Arena(driver, std::move(tag), device, id, base, capacity, sizes, exports));
  return {};
}

Arena::Arena(Driver& driver, std::string tag, int device, uint64_t id, uintptr_t base, size_t capacity, ChunkSizes sizes, Exports& exports)
    : driver_(driver),
      tag_(std::move(tag)),
      device_(device),
      id_(id),
      base_(base),
      capacity_(capacity),
      blocks_(capacity),
      exports_(exports),
      chunks_(driver, device, base, sizes, exports),
      host_copy_(driver, device),
      max_chunk_bytes_(sizes.max_bytes) {}

Arena::~Arena() {
  // The owner has checked that no block is in use. A failure here cannot be reported, and is resolved when the process ends.
  static_cast<void>(driver_.synchronize(device_));
  static_cast<void>(chunks_.unmap(chunks_.mapped()));
  uint64_t given_back = 0;
  static_cast<void>(chunks_.release(chunks_.kept(), &given_back));
  static_cast<void>(driver_.unreserve(base_, capacity_ + max_chunk_bytes_));
}

Status Arena::allocate(size_t bytes, uintptr_t* address) {
  Status status = check_whole();
  if (!status.ok()) return status;
  if (state != State::resident) return failure(Code::paused, tag_ + " is asleep: resume it before allocating in it");
  Range block{};
  if (!blocks_.find(bytes, &block)) return no_room(tag_ + "'s address range", bytes, capacity_ - blocks_.used_bytes());
  status = back_with_memory(block);
  if (!status.ok()) return status;
  blocks_.take(block);
  *address = base_ + block.offset;
  return {};
}

Status Arena::release(uintptr_t address) {
  Range block{};
  if (!contains(address) || !blocks_.release(address - base_, &block)) {
    return failure(Code::not_found, "no block of " + tag_ + " starts at this address");
  }
  frozen_.remove(block);
  host_copy_.forget(block);
  trim(block);
  return {};
}

Status Arena::begin_save() {
  Status status = host_copy_.save(base_, blocks_.runs());
  has_saved_content_ = status.ok();
  return status;
}

Status Arena::unmap() {
  unmapped_ = chunks_.mapped();
  return chunks_.unmap(unmapped_);
}

Status Arena::map_again() { return chunks_.map(unmapped_); }

Status Arena::commit_pause(uint64_t* given_back) {
  state = State::paused;
  if (!policy.keep_content) has_saved_content_ = false;
  return policy.keep_chunks ? Status{} : release_kept(given_back);
}

Status Arena::release_kept(uint64_t* given_back) {
  Status status = chunks_.release(chunks_.kept(), given_back);
  if (!status.ok()) status.message = tag_ + " sleeps, but " + readable(chunks_.bytes_of(chunks_.kept())) + " stay: " + status.message;
  return status;
}

Status Arena::create_missing() {
  mapped_.clear();
  created_ = chunks_.absent_in(blocks_);
  Status status = chunks_.create(created_);
  if (!status.ok()) created_.clear();
  return status;
}

Status Arena::map(uint64_t* mapped_bytes) {
  Chunks::Indices wanted = chunks_.unmapped_in(blocks_);
  Status status = chunks_.map(wanted);
  if (!status.ok()) return status;
  mapped_ = std::move(wanted);
  *mapped_bytes += chunks_.bytes_of(mapped_);
  return {};
}

Status Arena::begin_restore(const HostCopy::Reached& reached) { return host_copy_.restore(base_, blocks_.runs(), reached); }

Status Arena::undo_resume() {
  state = State::paused;
  Status status = chunks_.unmap(mapped_);
  if (!status.ok()) return status;
  uint64_t given_back = 0;
  status = chunks_.release(created_, &given_back);
  created_.clear();
  mapped_.clear();
  return status;
}

void Arena::commit_resume() {
  state = State::resident;
  created_.clear();
  mapped_.clear();
  has_saved_content_ = false;
  // Kept, but empty. What cannot be released now shows in the usage and is released by the next pause.
  uint64_t given_back = 0;
  static_cast<void>(chunks_.release(chunks_.kept(), &given_back));
}

Status Arena::export_chunks(Access access, std::vector<SharedChunk>* chunks, std::vector<Exports::Piece>* pieces) const {
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& chunk = chunks_.at(i);
    if (chunk.physical == 0) continue;
    SharedChunk shared{chunk.range.offset, chunk.range.bytes, -1};
    Status status = driver_.export_fd(chunk.physical, access, &shared.fd);
    if (!status.ok()) {
      for (const SharedChunk& done : *chunks) close(done.fd);
      chunks->clear();
      return status;
    }
    chunks->push_back(shared);
    pieces->push_back({chunk.serial, chunk.range.bytes});
  }
  return chunks->empty() ? failure(Code::paused, tag_ + " holds no memory to export: it is empty or asleep") : Status{};
}

Usage Arena::usage() const {
  Chunks::Indices mapped = chunks_.mapped(), kept = chunks_.kept();
  return Usage{state,
               blocks_.used_bytes(),
               chunks_.bytes_in(blocks_),
               chunks_.bytes_of(mapped),
               chunks_.bytes_of(kept),
               host_copy_.pinned_bytes(),
               exports_.exported_bytes(id_),
               exports_.held_bytes(id_),
               mapped.size() + kept.size(),
               blocks_.num_blocks()};
}

Status Arena::check_whole() const {
  if (!chunks_.is_broken()) return {};
  return failure(Code::poisoned, tag_ + ": an undo failed, its pages are in an unknown state; restart the process");
}

Status Arena::back_with_memory(const Range& block) {
  size_t needed_bytes = 0;
  Status status = back_exactly(block, true, &needed_bytes);
  if (status.code == Code::out_of_memory) status = back_exactly(block, false, &needed_bytes);
  if (status.code != Code::out_of_memory) return status;
  size_t free_bytes = 0, total_bytes = 0;
  if (!driver_.room(device_, &free_bytes, &total_bytes).ok()) return status;
  return no_room(tag_, needed_bytes, free_bytes);
}

Status Arena::back_exactly(const Range& block, bool grow_ahead, size_t* needed_bytes) {
  size_t num_chunks = chunks_.size();
  chunks_.extend(block.end(), grow_ahead);
  Chunks::Indices absent, unmapped;
  *needed_bytes = 0;
  for (size_t index : chunks_.overlapping(block)) {
    if (chunks_.at(index).physical == 0) {
      absent.push_back(index);
      *needed_bytes += chunks_.at(index).range.bytes;
    }
    if (!chunks_.at(index).is_mapped) unmapped.push_back(index);
  }
  Status status = chunks_.create(absent);
  if (status.ok()) {
    status = chunks_.map(unmapped);
    uint64_t given_back = 0;
    if (!status.ok()) static_cast<void>(chunks_.release(absent, &given_back));
  }
  if (!status.ok()) chunks_.shrink(num_chunks);
  return status;
}

void Arena::trim(const Range& block) {
  Chunks::Indices empty;
  bool is_mapped = false;
  for (size_t index : chunks_.overlapping(block)) {
    if (chunks_.at(index).physical == 0 || blocks_.is_in_use(chunks_.at(index).range)) continue;
    empty.push_back(index);
    is_mapped = is_mapped || chunks_.at(index).is_mapped;
  }
  // A chunk that cannot be released stays, to be reused or released by the next pause.
  if (empty.empty() || ticket != 0 || chunks_.is_broken()) return;
  if (is_mapped && (!driver_.synchronize(device_).ok() || !chunks_.unmap(empty).ok())) return;
  uint64_t given_back = 0;
  static_cast<void>(chunks_.release(empty, &given_back));
}

}  // namespace tasuki
