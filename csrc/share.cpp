#include "share.h"

#include <algorithm>

namespace tasuki {
namespace {

// Larger than any GPU's memory: a larger offset is invalid.
constexpr uint64_t kMaxSpan = uint64_t{1} << 44;

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

}  // namespace

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
  for (const Piece& piece : pieces_) static_cast<void>(driver_.release(piece.physical));
  if (base_ != 0) static_cast<void>(driver_.unreserve(base_, span_bytes_));
}

Status Import::import_chunks(const std::vector<SharedChunk>& chunks) {
  pieces_.reserve(chunks.size());
  for (const SharedChunk& chunk : chunks) {
    Piece piece{chunk.offset, chunk.bytes, 0};
    Status status = driver_.import_fd(device_, chunk.fd, chunk.bytes, access_, &piece.physical);
    if (!status.ok()) return status.message = "chunk at offset " + std::to_string(chunk.offset) + ": " + status.message, status;
    pieces_.push_back(piece);
  }
  return {};
}

Status Import::map() {
  Status status = map_first(pieces_.size());
  is_mapped_ = status.ok();
  return status;
}

Status Import::unmap() {
  if (!is_mapped_) return {};
  Status status = driver_.synchronize(device_);
  if (!status.ok()) return status;
  for (size_t first = 0; first < pieces_.size();) {
    size_t end = run_end(pieces_, first);
    status = driver_.unmap(base_ + pieces_[first].offset, bytes_of(pieces_, first, end));
    if (!status.ok()) {
      Status undo = map_first(first);
      return undo.ok() ? status : undo;
    }
    first = end;
  }
  is_mapped_ = false;
  return {};
}

Status Import::release() {
  Status status = unmap();
  while (status.ok() && !pieces_.empty()) {
    status = driver_.release(pieces_.back().physical);
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
  if (!status.ok()) static_cast<void>(release());
  return status;
}

uint64_t Import::bytes() const {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces_) bytes += piece.bytes;
  return bytes;
}

Status Import::map_first(size_t num_pieces) {
  Status status;
  size_t num_mapped = 0;
  while (num_mapped < num_pieces) {
    const Piece& piece = pieces_[num_mapped];
    status = driver_.map(base_ + piece.offset, piece.bytes, piece.physical);
    if (!status.ok()) break;
    ++num_mapped;
  }
  // One call for adjacent chunks, as in Chunks::allow_runs.
  for (size_t first = 0; status.ok() && first < num_pieces;) {
    size_t end = std::min(run_end(pieces_, first), num_pieces);
    status = driver_.allow(base_ + pieces_[first].offset, bytes_of(pieces_, first, end), device_, access_);
    first = end;
  }
  if (status.ok()) return {};
  for (size_t i = 0; i < num_mapped; ++i) static_cast<void>(driver_.unmap(base_ + pieces_[i].offset, pieces_[i].bytes));
  return status;
}

}  // namespace tasuki
