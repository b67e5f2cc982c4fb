#include "memory.h"

#include <algorithm>

namespace tasuki {
namespace {

using Lock = std::lock_guard<std::mutex>;

}  // namespace

Memory::~Memory() {
  transfers_.clear();  // their marks need the drivers
}

Status Memory::set_driver(DriverKind kind, std::unique_ptr<Driver> driver) {
  Lock lock(mutex_);
  if (!drivers_.try_emplace(kind, std::move(driver)).second) return failure(Code::busy, "this driver is open already");
  return {};
}

bool Memory::has_driver(DriverKind kind) {
  Lock lock(mutex_);
  return drivers_.count(kind) != 0;
}

Status Memory::create_arena(DriverKind kind, const std::string& tag, int device, const ArenaOptions& options, uint64_t* arena) {
  Lock lock(mutex_);
  Driver* driver = nullptr;
  Status status = driver_of(kind, &driver);
  if (!status.ok()) return status;
  std::unique_ptr<Arena> made;
  status = Arena::make(*driver, tag, device, options, last_id_ + 1, exports_, &made);
  if (!status.ok()) return status;
  *arena = ++last_id_;
  by_address_[made->base()] = made.get();
  arenas_[*arena] = std::move(made);
  return {};
}

Status Memory::destroy_arena(uint64_t arena) {
  Lock lock(mutex_);
  std::vector<Arena*> found;
  Status status = find({arena}, &found);
  if (status.ok()) status = settle(found);
  if (!status.ok()) return status;
  if (found[0]->num_blocks() != 0) {
    return failure(Code::busy, found[0]->tag() + " still holds " + std::to_string(found[0]->num_blocks()) + " blocks in use");
  }
  by_address_.erase(found[0]->base());
  arenas_.erase(arena);
  return {};
}

Status Memory::allocate(uint64_t arena, size_t bytes, uintptr_t* address) {
  Lock lock(mutex_);
  std::vector<Arena*> found;
  Status status = find({arena}, &found);
  if (status.ok() && found[0]->state == State::resuming) status = settle(found);
  return status.ok() ? found[0]->allocate(bytes, address) : status;
}

Status Memory::release(uintptr_t address) {
  Lock lock(mutex_);
  auto after = by_address_.upper_bound(address);
  if (after == by_address_.begin() || !std::prev(after)->second->contains(address)) {
    return failure(Code::not_found, "this address is in no arena");
  }
  return std::prev(after)->second->release(address);
}

Status Memory::freeze(uintptr_t address, size_t bytes, bool* is_ours) {
  Lock lock(mutex_);
  auto after = by_address_.upper_bound(address);
  *is_ours = after != by_address_.begin() && std::prev(after)->second->contains(address);
  if (!*is_ours) return {};
  Arena& arena = *std::prev(after)->second;
  if (bytes == 0 || !arena.contains(address + bytes - 1)) return failure(Code::bad_argument, "bytes: none, or beyond the arena");
  arena.freeze(address, bytes);
  return {};
}

Status Memory::save_frozen(uint64_t arena) {
  Lock lock(mutex_);
  std::vector<Arena*> found;
  Status status = find({arena}, &found);
  if (status.ok()) status = settle(found);
  if (!status.ok() || found[0]->state == State::paused || found[0]->has_saved_frozen()) return status;
  status = found[0]->driver().synchronize(found[0]->device());
  if (status.ok()) status = found[0]->begin_save();
  if (status.ok()) status = found[0]->driver().synchronize(found[0]->device());
  if (status.ok()) found[0]->end_save();
  return status;
}

Status Memory::restore_frozen(uint64_t arena) {
  Lock lock(mutex_);
  std::vector<Arena*> found;
  Status status = find({arena}, &found);
  if (status.ok()) status = settle(found);
  if (!status.ok() || found[0]->state == State::paused) return status;
  status = found[0]->driver().synchronize(found[0]->device());  // no kernel still writes to them
  if (status.ok()) status = found[0]->restore_frozen();
  return status.ok() ? found[0]->driver().synchronize(found[0]->device()) : status;
}

Status Memory::reserve_host(uint64_t arena, size_t total_bytes, size_t max_bytes, size_t* missing) {
  std::vector<Arena*> found;
  Driver* driver = nullptr;
  int device = 0;
  size_t bytes = 0;
  *missing = 0;
  {
    Lock lock(mutex_);
    Status status = find({arena}, &found);
    if (!status.ok() || !found[0]->policy.keep_content) return status;
    driver = &found[0]->driver(), device = found[0]->device();
    bytes = std::min(max_bytes, found[0]->missing_host_bytes(total_bytes));
  }
  if (bytes == 0) return {};
  void* host = nullptr;
  Status status = pin(*driver, device, bytes, &host);
  if (!status.ok()) return status;
  Lock lock(mutex_);
  found.clear();
  status = find({arena}, &found);
  if (!status.ok()) return static_cast<void>(driver->unpin(device, host, bytes)), status;
  found[0]->adopt_host(host, bytes);
  *missing = found[0]->missing_host_bytes(total_bytes);
  return {};
}

Status Memory::set_policy(uint64_t arena, const PausePolicy& policy) {
  Lock lock(mutex_);
  std::vector<Arena*> found;
  Status status = find({arena}, &found);
  if (status.ok()) status = settle(found);
  if (status.ok()) found[0]->policy = policy;
  return status;
}

Status Memory::pause(const Ids& ids, uint64_t* given_back) {
  Lock lock(mutex_);
  std::vector<Arena*> arenas;
  Status status = find(ids, &arenas);
  if (status.ok()) status = settle(arenas);
  return status.ok() ? pause_all(arenas, given_back) : status;
}

Status Memory::resume(const Ids& ids, uint64_t* mapped_bytes) {
  Lock lock(mutex_);
  std::vector<Arena*> arenas;
  uint64_t ticket = 0;
  Status status = find(ids, &arenas);
  if (status.ok()) status = settle(arenas);
  if (status.ok()) status = begin_resume(arenas, &ticket);
  return status.ok() ? take(ticket, mapped_bytes) : status;
}

Status Memory::resume_async(const Ids& ids, uint64_t* ticket) {
  Lock lock(mutex_);
  std::vector<Arena*> arenas;
  Status status = find(ids, &arenas);
  if (status.ok()) status = settle(arenas);
  return status.ok() ? begin_resume(arenas, ticket) : status;
}

Status Memory::wait(uint64_t ticket, uint64_t* bytes) {
  std::vector<std::shared_ptr<Mark>> marks;
  {
    Lock lock(mutex_);
    auto found = transfers_.find(ticket);
    if (found != transfers_.end()) marks = found->second.marks;
  }
  // Waits without the mutex, so that other arenas stay usable; `take` sees a failure again.
  for (const auto& mark : marks) static_cast<void>(mark->driver.wait(mark->device, mark->event));
  Lock lock(mutex_);
  return take(ticket, bytes);
}

Status Memory::stream_after(uint64_t ticket, uintptr_t stream, uintptr_t address, size_t bytes) {
  Lock lock(mutex_);
  auto found = transfers_.find(ticket);
  if (found == transfers_.end()) return failure(Code::not_found, "no such transfer");
  const Transfer& transfer = found->second;
  for (const Piece& piece : transfer.pieces) {
    if (bytes == 0 || !piece.arena->contains(address) || piece.end < address + bytes) continue;
    return piece.mark->driver.stream_after(piece.mark->device, stream, piece.mark->event);
  }
  for (const auto& mark : transfer.marks) {
    Status status = mark->driver.stream_after(mark->device, stream, mark->event);
    if (!status.ok()) return status;
  }
  return {};
}

Status Memory::usage(uint64_t arena, Usage* usage) {
  Lock lock(mutex_);
  auto found = arenas_.find(arena);
  if (found == arenas_.end()) return failure(Code::not_found, "no such arena");
  *usage = found->second->usage();
  return {};
}

Totals Memory::totals() {
  Lock lock(mutex_);
  Totals totals{};
  for (const auto& [id, arena] : arenas_) {
    Usage usage = arena->usage();
    totals.mapped_bytes += usage.mapped_bytes;
    totals.kept_bytes += usage.kept_bytes;
    totals.host_copy_bytes += usage.host_copy_bytes;
  }
  for (const auto& [id, import] : imports_) totals.imported_bytes += import->bytes();
  totals.num_arenas = arenas_.size();
  totals.num_imports = imports_.size();
  totals.num_exports = exports_.num_open();
  totals.num_transfers = transfers_.size();
  return totals;
}

Status Memory::export_arena(uint64_t arena, Access access, size_t max_chunks, std::vector<SharedChunk>* chunks, uintptr_t* base,
                            uint64_t* id) {
  Lock lock(mutex_);
  std::vector<Arena*> found;
  Status status = find({arena}, &found);
  std::vector<Exports::Piece> pieces;
  if (status.ok()) status = settle(found);
  if (status.ok() && found[0]->usage().num_chunks > max_chunks) status = failure(Code::bad_argument, "more chunks than room for them");
  if (status.ok()) status = found[0]->export_chunks(access, chunks, &pieces);
  if (!status.ok()) return status;
  *base = found[0]->base();
  *id = exports_.open(arena, std::move(pieces));
  return {};
}

Status Memory::close_export(uint64_t id) {
  Lock lock(mutex_);
  return exports_.close(id) ? Status{} : failure(Code::not_found, "no such export");
}

Status Memory::open_import(DriverKind kind, int device, Access access, const std::vector<SharedChunk>& chunks, uint64_t* id,
                           uintptr_t* base) {
  Lock lock(mutex_);
  Driver* driver = nullptr;
  std::unique_ptr<Import> made;
  Status status = driver_of(kind, &driver);
  if (status.ok()) status = Import::open(*driver, device, access, chunks, &made);
  if (!status.ok()) return status;
  *base = made->base();
  imports_[*id = ++last_id_] = std::move(made);
  return {};
}

Status Memory::release_import(uint64_t id) {
  Lock lock(mutex_);
  auto found = imports_.find(id);
  return found == imports_.end() ? failure(Code::not_found, "no such import") : found->second->release();
}

Status Memory::renew_import(uint64_t id, const std::vector<SharedChunk>& chunks) {
  Lock lock(mutex_);
  auto found = imports_.find(id);
  return found == imports_.end() ? failure(Code::not_found, "no such import") : found->second->renew(chunks);
}

Status Memory::close_import(uint64_t id) {
  Lock lock(mutex_);
  auto found = imports_.find(id);
  if (found == imports_.end()) return failure(Code::not_found, "no such import");
  Status status = found->second->unmap();
  imports_.erase(found);
  return status;
}

Status Memory::find(const Ids& ids, std::vector<Arena*>* arenas) {
  for (uint64_t id : ids) {
    auto found = arenas_.find(id);
    if (found == arenas_.end()) return failure(Code::not_found, "no such arena");
    Status status = found->second->check_whole();
    if (!status.ok()) return status;
    if (std::find(arenas->begin(), arenas->end(), found->second.get()) == arenas->end()) arenas->push_back(found->second.get());
  }
  return {};
}

Status Memory::driver_of(DriverKind kind, Driver** driver) {
  auto found = drivers_.find(kind);
  if (found == drivers_.end()) return failure(Code::unavailable, "this driver is not open");
  *driver = found->second.get();
  return {};
}

}  // namespace tasuki
