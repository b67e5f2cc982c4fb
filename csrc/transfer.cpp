// Pause and resume of several arenas: the steps, and their undo on failure. Called with the mutex held.
#include <algorithm>
#include <set>

#include "memory.h"

namespace tasuki {
namespace {

Status synchronize(const std::vector<Arena*>& arenas) {
  std::set<std::pair<Driver*, int>> devices;
  for (Arena* arena : arenas) devices.insert({&arena->driver(), arena->device()});
  for (const auto& [driver, device] : devices) {
    Status status = driver->synchronize(device);
    if (!status.ok()) return status;
  }
  return {};
}

// The cause of a failure or, worse, that its undo failed.
Status worse(const Status& cause, const Status& undo) { return undo.ok() ? cause : undo; }

}  // namespace

// Finishes running transfers of `arenas`, so that the next one starts from an idle state.
Status Memory::settle(const std::vector<Arena*>& arenas) {
  for (Arena* arena : arenas) {
    if (arena->ticket == 0) continue;
    Transfer& transfer = transfers_.at(arena->ticket);
    finish(&transfer);
    if (!transfer.status.ok()) return transfer.status;
  }
  return {};
}

uint64_t Memory::add(Transfer transfer) {
  for (auto old = transfers_.begin(); transfers_.size() >= kMaxUnread && old != transfers_.end();) {
    old = old->second.is_done ? transfers_.erase(old) : std::next(old);
  }
  uint64_t ticket = ++last_id_;
  for (Arena* arena : transfer.arenas) arena->ticket = ticket;
  transfers_[ticket] = std::move(transfer);
  return ticket;
}

Status Memory::take(uint64_t ticket, uint64_t* bytes) {
  auto found = transfers_.find(ticket);
  if (found == transfers_.end()) return failure(Code::not_found, "no such transfer, or its answer was taken already");
  finish(&found->second);
  Status status = found->second.status;
  *bytes = found->second.bytes;
  transfers_.erase(found);
  return status;
}

void Memory::finish(Transfer* transfer) {
  if (transfer->is_done) return;
  transfer->status = finish_resume(transfer);
  transfer->is_done = true;
  transfer->marks.clear();
  transfer->pieces.clear();
  for (Arena* arena : transfer->arenas) arena->ticket = 0;
}

Status Memory::mark(Driver& driver, int device, std::shared_ptr<Mark>* mark) {
  Event event = 0;
  Status status = driver.mark(device, &event);
  if (status.ok()) *mark = std::make_shared<Mark>(driver, device, event);
  return status;
}

Status Memory::mark(const std::vector<Arena*>& arenas, Transfer* transfer) {
  std::set<std::pair<Driver*, int>> devices;
  for (Arena* arena : arenas) devices.insert({&arena->driver(), arena->device()});
  for (const auto& [driver, device] : devices) {
    Status status = mark(*driver, device, &transfer->marks.emplace_back());
    if (!status.ok()) return transfer->marks.pop_back(), status;
  }
  return {};
}

Status Memory::pause_all(const std::vector<Arena*>& arenas, uint64_t* given_back) {
  std::vector<Arena*> awake, saved;
  for (Arena* arena : arenas) {
    if (arena->state == State::resident) awake.push_back(arena);
    if (arena->state == State::resident && arena->policy.keep_content) saved.push_back(arena);
  }
  Status status = synchronize(saved);
  for (Arena* arena : saved) {
    if (status.ok()) status = arena->begin_save();
  }
  if (status.ok()) status = synchronize(awake);  // copies have arrived, and no kernel runs over pages that go
  for (Arena* arena : saved) {
    if (status.ok()) arena->end_save();
  }
  size_t num_unmapped = 0;
  while (status.ok() && num_unmapped < awake.size()) {
    status = awake[num_unmapped]->unmap();
    if (status.ok()) ++num_unmapped;
  }
  if (!status.ok()) {
    // Copies started before a failure read memory that stays mapped; the next save is ordered after them.
    for (size_t i = 0; i < num_unmapped; ++i) status = worse(status, awake[i]->map_again());
    return status;
  }
  for (Arena* arena : arenas) {
    Status one;
    if (arena->state == State::resident) {
      one = arena->commit_pause(given_back);
    } else if (!arena->policy.keep_chunks) {
      one = arena->release_kept(given_back);
    }
    status = worse(status, one);
  }
  return status;
}

Status Memory::begin_resume(const std::vector<Arena*>& arenas, uint64_t* ticket) {
  Transfer transfer;
  std::copy_if(arenas.begin(), arenas.end(), std::back_inserter(transfer.arenas),
               [](Arena* arena) { return arena->state == State::paused; });
  Status status;
  size_t num_started = 0;
  while (status.ok() && num_started < transfer.arenas.size()) {
    Arena* arena = transfer.arenas[num_started];
    status = arena->create_missing();
    if (status.code == Code::out_of_memory) status = room_failure(transfer.arenas, num_started, status);
    if (status.ok()) ++num_started;
  }
  for (size_t i = 0; status.ok() && i < num_started; ++i) status = transfer.arenas[i]->map(&transfer.bytes);
  if (status.ok()) status = restore(&transfer);
  if (!status.ok()) {
    for (size_t i = 0; i < num_started; ++i) status = worse(status, transfer.arenas[i]->undo_resume());
    return status;
  }
  for (Arena* arena : transfer.arenas) arena->state = State::resuming;
  *ticket = add(std::move(transfer));
  return {};
}

Status Memory::restore(Transfer* transfer) {
  std::vector<Arena*> saved;
  std::copy_if(transfer->arenas.begin(), transfer->arenas.end(), std::back_inserter(saved),
               [](Arena* arena) { return arena->has_saved_content(); });
  Status status;
  for (Arena* arena : saved) {
    auto reached = [&](uintptr_t end) {
      std::shared_ptr<Mark> behind;
      Status marked = mark(arena->driver(), arena->device(), &behind);
      if (marked.ok()) transfer->pieces.push_back({arena, end, std::move(behind)});
      return marked;
    };
    if (status.ok()) status = arena->begin_restore(reached);
  }
  if (status.ok()) status = mark(saved, transfer);
  // Copies already started write to pages that the undo unmaps.
  return status.ok() ? status : worse(status, synchronize(saved));
}

Status Memory::finish_resume(Transfer* transfer) {
  Status status;
  for (const auto& mark : transfer->marks) {
    if (status.ok()) status = mark->driver.wait(mark->device, mark->event);
  }
  if (status.ok()) {
    for (Arena* arena : transfer->arenas) arena->commit_resume();
    return {};
  }
  for (Arena* arena : transfer->arenas) status = worse(status, arena->undo_resume());
  transfer->bytes = 0;
  return status;
}

// Names every tag of the resume and their total shortage, since granting them one by one would only fail later.
Status Memory::room_failure(const std::vector<Arena*>& arenas, size_t num_created, const Status& cause) {
  const Arena& failed = *arenas[num_created];
  uint64_t needed_bytes = 0;
  std::string tags;
  for (size_t i = 0; i < arenas.size(); ++i) {
    bool is_same_device = &arenas[i]->driver() == &failed.driver() && arenas[i]->device() == failed.device();
    if (!is_same_device) continue;
    needed_bytes += i < num_created ? arenas[i]->created_bytes() : arenas[i]->missing_bytes();
    tags += (tags.empty() ? "" : ", ") + arenas[i]->tag();
  }
  for (size_t i = 0; i < num_created; ++i) static_cast<void>(arenas[i]->undo_resume());
  size_t free_bytes = 0, total_bytes = 0;
  if (!failed.driver().room(failed.device(), &free_bytes, &total_bytes).ok()) return cause;
  return no_room(tags, needed_bytes, free_bytes);
}

}  // namespace tasuki
