// All arenas, exports and imports of a process under one mutex, and operations on several arenas, all or nothing.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "arena.h"
#include "driver.h"
#include "share.h"

namespace tasuki {

enum class DriverKind { host = 0, cuda = 1 };

struct Totals {
  uint64_t num_arenas;
  uint64_t mapped_bytes;
  uint64_t kept_bytes;
  uint64_t host_copy_bytes;
  uint64_t imported_bytes;
  uint64_t num_imports;
  uint64_t num_exports;
  uint64_t num_transfers;
};

class Memory {
 public:
  using Ids = std::vector<uint64_t>;

  ~Memory();

  // A driver can be set once per kind.
  Status set_driver(DriverKind kind, std::unique_ptr<Driver> driver);
  bool has_driver(DriverKind kind);

  Status create_arena(DriverKind kind, const std::string& tag, int device, const ArenaOptions& options, uint64_t* arena);
  // Refused while blocks are in use.
  Status destroy_arena(uint64_t arena);

  Status allocate(uint64_t arena, size_t bytes, uintptr_t* address);
  // For the arena that contains the address; not_found for foreign memory.
  Status release(uintptr_t address);
  // *is_ours: whether the address is in an arena.
  Status freeze(uintptr_t address, size_t bytes, bool* is_ours);
  // Copies frozen bytes to the host, unless they are there; and undoes what was written to them since. Nothing while paused.
  Status save_frozen(uint64_t arena);
  Status restore_frozen(uint64_t arena);
  // Pins at most `max_bytes` of the host memory that a pause of the arena needs, now or once it holds `total_bytes`; nothing if a pause
  // keeps no content. Pins without holding the mutex.
  Status reserve_host(uint64_t arena, size_t total_bytes, size_t max_bytes, size_t* missing);

  // What later pauses of this arena keep; by default they discard everything.
  Status set_policy(uint64_t arena, const PausePolicy& policy);

  // All or none of `arenas`. Arenas already paused (or resident) count zero bytes.
  Status pause(const Ids& arenas, uint64_t* given_back);
  Status resume(const Ids& arenas, uint64_t* mapped_bytes);

  // Maps immediately; the content is ready after `wait`, or for a stream after `stream_after`.
  Status resume_async(const Ids& arenas, uint64_t* ticket);
  Status wait(uint64_t ticket, uint64_t* bytes);
  // bytes: 0 waits for everything, else for this range and all lower addresses of the same arena.
  Status stream_after(uint64_t ticket, uintptr_t stream, uintptr_t address, size_t bytes);

  Status usage(uint64_t arena, Usage* usage);
  Totals totals();

  // Refused, with nothing opened, if the arena has more than `max_chunks`.
  Status export_arena(uint64_t arena, Access access, size_t max_chunks, std::vector<SharedChunk>* chunks, uintptr_t* base, uint64_t* id);
  Status close_export(uint64_t id);
  Status open_import(DriverKind kind, int device, Access access, const std::vector<SharedChunk>& chunks, uint64_t* id, uintptr_t* base);
  Status release_import(uint64_t id);
  Status renew_import(uint64_t id, const std::vector<SharedChunk>& chunks);
  Status close_import(uint64_t id);

 private:
  // Results of finished transfers that nobody has asked for yet.
  static constexpr size_t kMaxUnread = 256;

  // An event, destroyed once nobody waits for it.
  struct Mark {
    Driver& driver;
    int device;
    Event event;
    Mark(Driver& driver, int device, Event event) : driver(driver), device(device), event(event) {}
    ~Mark() { driver.forget(device, event); }
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;
  };

  // Address up to which one arena's content is restored after a mark.
  struct Piece {
    Arena* arena;
    uintptr_t end;
    std::shared_ptr<Mark> mark;
  };

  // A resume.
  struct Transfer {
    std::vector<Arena*> arenas;
    std::vector<std::shared_ptr<Mark>> marks;  // after everything, one per device
    std::vector<Piece> pieces;
    bool is_done = false;
    Status status;
    uint64_t bytes = 0;
  };

  Status find(const Ids& ids, std::vector<Arena*>* arenas);
  Status settle(const std::vector<Arena*>& arenas);
  uint64_t add(Transfer transfer);
  Status take(uint64_t ticket, uint64_t* bytes);
  Status pause_all(const std::vector<Arena*>& arenas, uint64_t* given_back);
  Status begin_resume(const std::vector<Arena*>& arenas, uint64_t* ticket);
  Status restore(Transfer* transfer);
  void finish(Transfer* transfer);
  Status finish_resume(Transfer* transfer);
  static Status mark(Driver& driver, int device, std::shared_ptr<Mark>* mark);
  static Status mark(const std::vector<Arena*>& arenas, Transfer* transfer);
  Status room_failure(const std::vector<Arena*>& arenas, size_t num_created, const Status& cause);
  Status driver_of(DriverKind kind, Driver** driver);

  std::mutex mutex_;
  std::map<DriverKind, std::unique_ptr<Driver>> drivers_;
  Exports exports_;
  std::map<uint64_t, std::unique_ptr<Arena>> arenas_;
  std::map<uintptr_t, Arena*> by_address_;
  std::map<uint64_t, std::unique_ptr<Import>> imports_;
  std::map<uint64_t, Transfer> transfers_;
  uint64_t last_id_ = 0;
};

}  // namespace tasuki
