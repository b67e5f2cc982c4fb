#include "share.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace tasuki {
namespace {

// Larger than any GPU's memory: a larger offset is invalid.
constexpr uint64_t kMaxSpan = uint64_t{1} << 44;

std::atomic<uint64_t> num_imported{0};

Status check_layout(const std::vector<SharedChunk>& chunks, size_t granularity) {
  if (chunks.empty()) return failure(Code::bad_handle, "no chunks");
  uint64_t end = 0;
  for (const SharedChunk& chunk : chunks) {
    std::string which = "chunk at offset " + std::to_string(chunk.offset);
    if (chunk.bytes == 0 || chunk.bytes % granularity != 0 || chunk.offset % granularity != 0) {
      return failure(Code::bad_handle, which + ": offset and bytes must be multiples of " + std::to_string(granularity));
    }
    if (chunk.offset > kMaxSpan || chunk.bytes > kMaxSpan) return failure(Code::bad_handle, which + ": beyond " + readable(kMaxSpan));
    if (chunk.offset < end) return failure(Code::bad_handle, which + ": overlaps the one before, or is out of order");
    end = chunk.offset + chunk.bytes;
  }
  return {};
}

// Adjacent pieces from `first` on: the index behind them.
template <typename Piece>
size_t run_end(const std::vector<Piece>& pieces, size_t first) {
  size_t end = first + 1;
  while (end < pieces.size() && pieces[end].offset == pieces[end - 1].offset + pieces[end - 1].bytes) ++end;
  return end;
}

template <typename Piece>
uint64_t bytes_of(const std::vector<Piece>& pieces, size_t first, size_t end) {
  return pieces[end - 1].offset + pieces[end - 1].bytes - pieces[first].offset;
}

// The piece at this offset, of pieces in order; null if there is none.
template <typename Piece>
const Piece* at_offset(const std::vector<Piece>& pieces, uint64_t offset) {
  auto found = std::lower_bound(pieces.begin(), pieces.end(), offset, [](const Piece& piece, uint64_t at) { return piece.offset < at; });
  return found == pieces.end() || found->offset != offset ? nullptr : &*found;
}

}  // namespace

uint64_t num_imported_chunks() { return num_imported; }

uint64_t Exports::open(uint64_t arena, std::vector<Piece> pieces) {
  for (const Piece& piece : pieces) {
    auto& chunk = chunks_.try_emplace(piece.serial, Chunk{arena, piece.bytes, 0, false}).first->second;
    ++chunk.num_exports;
  }
  exports_[++last_id_] = Export{arena, std::move(pieces)};
  return last_id_;
}

bool Exports::close(uint64_t id) {
  auto found = exports_.find(id);
  if (found == exports_.end()) return false;
  for (const Piece& piece : found->second.pieces) {
    auto chunk = chunks_.find(piece.serial);
    if (--chunk->second.num_exports == 0) chunks_.erase(chunk);
  }
  exports_.erase(found);
  return true;
}

bool Exports::released(uint64_t serial) {
  auto found = chunks_.find(serial);
  if (found == chunks_.end()) return false;
  found->second.is_released = true;
  return true;
}

uint64_t Exports::exported_bytes(uint64_t arena) const {
  uint64_t bytes = 0;
  for (const auto& [serial, chunk] : chunks_) bytes += chunk.arena == arena && !chunk.is_released ? chunk.bytes : 0;
  return bytes;
}

uint64_t Exports::held_bytes(uint64_t arena) const {
  uint64_t bytes = 0;
  for (const auto& [serial, chunk] : chunks_) bytes += chunk.arena == arena && chunk.is_released ? chunk.bytes : 0;
  return bytes;
}

Status Import::open(Driver& driver, int device, Access access, const std::vector<SharedChunk>& chunks, std::unique_ptr<Import>* import) {
  size_t granularity = 0;
  Status status = driver.granularity(device, &granularity);
  if (status.ok()) status = check_layout(chunks, granularity);
  if (!status.ok()) return status;
  std::unique_ptr<Import> made(new Import(driver, device, access));
  status = made->import_chunks(chunks);
  if (status.ok()) status = driver.reserve(device, chunks.back().offset + chunks.back().bytes, &made->base_);
  if (!status.ok()) return status;
  made->span_bytes_ = chunks.back().offset + chunks.back().bytes;
  status = made->map();
  if (status.ok()) *import = std::move(made);
  return status;
}

Import::~Import() {
  // A failure in a destructor cannot be reported; the end of the process frees the rest.
  static_cast<void>(unmap());
  for (const Piece& piece : pieces_) {
    if (!piece.is_kept) static_cast<void>(driver_.release(piece.physical));
  }
  for (const auto& [place, kept] : kept_) static_cast<void>(driver_.release(kept.physical));
  if (base_ != 0) static_cast<void>(driver_.unreserve(base_, span_bytes_));
}

Status Import::import_chunks(const std::vector<SharedChunk>& chunks) {
  pieces_.reserve(chunks.size());
  for (const SharedChunk& chunk : chunks) {
    Piece piece{chunk.offset, chunk.bytes, chunk.place, 0, false};
    Status status = import_one(chunk, &piece);
    if (!status.ok()) return status.message = "chunk at offset " + std::to_string(chunk.offset) + ": " + status.message, status;
    pieces_.push_back(piece);
  }
  return {};
}

Status Import::import_one(const SharedChunk& chunk, Piece* piece) {
  bool is_of_pool = chunk.place.pool != 0;
  if (is_of_pool) {
    Status status = driver_.read(chunk, access_, &piece->physical);
    if (status.code != Code::not_found) return status;
    auto found = kept_.find(chunk.place);
    if (found != kept_.end()) return reuse(chunk, found->second, piece);
  }
  Status status = driver_.import_fd(device_, chunk.fd, chunk.bytes, access_, &piece->physical);
  if (!status.ok()) return status;
  ++num_imported;
  if (!is_of_pool) return {};
  Kept kept{piece->physical, chunk.bytes, 0};
  static_cast<void>(driver_.identify(chunk.fd, &kept.identity));
  kept_[chunk.place] = kept;
  piece->is_kept = true;
  return {};
}

Status Import::reuse(const SharedChunk& chunk, const Kept& kept, Piece* piece) {
  if (chunk.bytes != kept.bytes) {
    return failure(Code::bad_handle, "the handle says " + std::to_string(chunk.bytes) + " bytes, the chunk of the pool has " +
                                         std::to_string(kept.bytes));
  }
  uint64_t identity = 0;
  static_cast<void>(driver_.identify(chunk.fd, &identity));
  if (identity != kept.identity) return failure(Code::bad_handle, "its descriptor is not the chunk of the pool that it is said to be");
  piece->physical = kept.physical;
  piece->is_kept = true;
  return {};
}

Status Import::map() {
  forget_in_child();
  std::vector<Piece> changed;
  for (const Piece& before : mapped_) {
    const Piece* now = at_offset(pieces_, before.offset);
    if (now == nullptr || now->bytes != before.bytes || now->place != before.place) changed.push_back(before);
  }
  Status status = unmap_pieces(changed);
  if (status.ok() && driver_.imports_take_fds()) status = release_unused();
  return status.ok() ? map_missing() : status;
}

Status Import::unmap() {
  forget_in_child();
  if (mapped_.empty()) return {};
  Status status = driver_.synchronize(device_);
  if (status.ok()) status = unmap_pieces(std::vector<Piece>(mapped_));
  if (status.ok() || pieces_.empty()) return status;
  Status undo = map_missing();
  return undo.ok() ? status : undo;
}

Status Import::release() {
  if (pieces_.empty()) return {};
  bool stays = access_ == Access::read_only;
  for (const Piece& piece : pieces_) stays = stays && piece.place.pool != 0;
  Status status = stays ? driver_.synchronize(device_) : unmap();
  while (status.ok() && !pieces_.empty()) {
    if (!pieces_.back().is_kept) status = driver_.release(pieces_.back().physical);
    if (status.ok()) pieces_.pop_back();
  }
  return status;
}

Status Import::renew(const std::vector<SharedChunk>& chunks) {
  if (!pieces_.empty()) return failure(Code::bad_argument, "the import still holds chunks: release it first");
  size_t granularity = 0;
  Status status = driver_.granularity(device_, &granularity);
  if (status.ok()) status = check_layout(chunks, granularity);
  if (status.ok() && chunks.back().offset + chunks.back().bytes > span_bytes_) {
    status = failure(Code::bad_handle, "the chunks span more than those before them, " + readable(span_bytes_));
  }
  if (status.ok()) status = import_chunks(chunks);
  if (status.ok()) status = map();
  if (status.ok()) return {};
  static_cast<void>(release());
  static_cast<void>(unmap());
  return status;
}

Status Import::release_unused() {
  for (auto one = kept_.begin(); one != kept_.end();) {
    Physical kept = one->second.physical;
    bool is_used = std::any_of(pieces_.begin(), pieces_.end(), [&](const Piece& piece) { return piece.physical == kept; });
    Status status = is_used ? Status{} : driver_.release(kept);
    if (!status.ok()) return status;
    one = is_used ? std::next(one) : kept_.erase(one);
  }
  return {};
}

uint64_t Import::bytes() const {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces_) bytes += piece.bytes;
  return bytes;
}

// A forked child does not have its parent's mappings.
void Import::forget_in_child() {
  if (mapped_by_ != getpid()) mapped_.clear();
}

Status Import::map_missing() {
  std::vector<Piece> missing;
  for (const Piece& piece : pieces_) {
    if (at_offset(mapped_, piece.offset) == nullptr) missing.push_back(piece);
  }
  Status status;
  size_t num_mapped = 0;
  while (num_mapped < missing.size()) {
    const Piece& piece = missing[num_mapped];
    status = driver_.map(base_ + piece.offset, piece.bytes, piece.physical);
    if (!status.ok()) break;
    ++num_mapped;
  }
  // One call for adjacent chunks, as in Chunks::allow_runs.
  for (size_t first = 0; status.ok() && first < missing.size();) {
    size_t end = run_end(missing, first);
    status = driver_.allow(base_ + missing[first].offset, bytes_of(missing, first, end), device_, access_);
    first = end;
  }
  if (!status.ok()) {
    for (size_t i = 0; i < num_mapped; ++i) static_cast<void>(driver_.unmap(base_ + missing[i].offset, missing[i].bytes));
    return status;
  }
  mapped_.insert(mapped_.end(), missing.begin(), missing.end());
  std::sort(mapped_.begin(), mapped_.end(), [](const Piece& one, const Piece& other) { return one.offset < other.offset; });
  mapped_by_ = getpid();
  return {};
}

Status Import::unmap_pieces(const std::vector<Piece>& pieces) {
  for (size_t first = 0; first < pieces.size();) {
    size_t end = run_end(pieces, first);
    Status status = driver_.unmap(base_ + pieces[first].offset, bytes_of(pieces, first, end));
    if (!status.ok()) return status;
    auto is_unmapped = [&](const Piece& piece) { return piece.offset >= pieces[first].offset && piece.offset <= pieces[end - 1].offset; };
    mapped_.erase(std::remove_if(mapped_.begin(), mapped_.end(), is_unmapped), mapped_.end());
    first = end;
  }
  return {};
}

}  // namespace tasuki
