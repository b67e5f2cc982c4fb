// The interface on which arenas are built: addresses, physical chunks, copies. Two implementations: CUDA VMM and host memfd.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "status.h"

namespace tasuki {

enum class Access { read_only, read_write };

using Physical = uint64_t;  // a driver's id for one physical chunk; 0 is none
using Event = uint64_t;     // a point in a device's copy stream; 0 is "already reached"

// A chunk of a pool, as every process names it. The pool's number is unique until the machine reboots.
struct PoolPlace {
  uint64_t pool = 0;  // 0: in no pool
  uint32_t index = 0;
  bool operator==(const PoolPlace& other) const { return pool == other.pool && index == other.index; }
  bool operator!=(const PoolPlace& other) const { return !(*this == other); }
  bool operator<(const PoolPlace& other) const { return pool != other.pool ? pool < other.pool : index < other.index; }
};

struct SharedChunk {
  uint64_t offset;
  uint64_t bytes;
  int fd;
  PoolPlace place = {};
};

class Driver {
 public:
  virtual ~Driver() = default;

  virtual const char* name() const = 0;
  virtual Status granularity(int device, size_t* bytes) = 0;
  virtual Status room(int device, size_t* free_bytes, size_t* total_bytes) = 0;

  // Addresses without memory.
  virtual Status reserve(int device, size_t bytes, uintptr_t* address) = 0;
  virtual Status unreserve(uintptr_t address, size_t bytes) = 0;

  // Memory without addresses. A physical chunk lives until it is released here and by every importer.
  virtual Status create(int device, size_t bytes, Physical* chunk) = 0;
  // Takes the chunk `before` again, which was released; not_found if it is not free any more, or in no pool.
  virtual Status create_again(Physical before, Physical* chunk) {
    static_cast<void>(before), static_cast<void>(chunk);
    return failure(Code::not_found, "no pool");
  }
  virtual Status release(Physical chunk) = 0;
  // Ensures that the memory exists before it is touched, where `create` only promises it.
  virtual Status commit(Physical) { return {}; }
  virtual Status export_fd(Physical chunk, Access access, int* fd) = 0;
  // Whether an imported chunk can be exported, too.
  virtual bool exports_imports() const { return true; }
  virtual Status import_fd(int device, int fd, size_t bytes, Access access, Physical* chunk) = 0;
  // Place of a chunk that was created here.
  virtual PoolPlace place_of(Physical) const { return {}; }
  // Begins to read a chunk that is in this driver's own pool, until its release, without importing it; not_found for any other.
  virtual Status read(const SharedChunk&, Access, Physical*) { return failure(Code::not_found, "no pool"); }
  // Whether an imported chunk takes a descriptor until its release.
  virtual bool imports_take_fds() const { return false; }
  // Equal for all descriptors of one chunk, in all processes; false if descriptors do not reveal it.
  virtual bool identify(int, uint64_t*) { return false; }
  // Equal for all imports of one chunk into this process; false if imports do not reveal it.
  virtual bool identify_import(Physical, uint64_t*) { return false; }

  // Mapping: map, then set access; unmap may cover several adjacent chunks.
  virtual Status map(uintptr_t address, size_t bytes, Physical chunk) = 0;
  virtual Status allow(uintptr_t address, size_t bytes, int device, Access access) = 0;
  virtual Status unmap(uintptr_t address, size_t bytes) = 0;

  // Waits until the device is idle.
  virtual Status synchronize(int device) = 0;

  // Pinned host memory, and copies on one side stream per device.
  virtual Status pin(int device, size_t bytes, void** host) = 0;
  virtual Status unpin(int device, void* host, size_t bytes) = 0;
  virtual Status copy_after(int device, uintptr_t stream) = 0;  // the side stream waits for work queued on `stream` so far
  virtual Status copy_to_host(int device, void* host, uintptr_t address, size_t bytes) = 0;
  virtual Status copy_from_host(int device, uintptr_t address, const void* host, size_t bytes) = 0;
  virtual Status mark(int device, Event* event) = 0;
  virtual Status wait(int device, Event event) = 0;
  virtual Status poll(int device, Event event, bool* is_reached) = 0;
  virtual Status stream_after(int device, uintptr_t stream, Event event) = 0;  // `stream` waits for `event`
  virtual void forget(int device, Event event) = 0;
};

class HostDriver : public Driver {
 public:
  // Limits the bytes in physical chunks of this process; 0 lifts the limit.
  virtual void set_budget(uint64_t bytes) = 0;
};

std::unique_ptr<HostDriver> make_host_driver();

// Loads libcuda from `path` ("libcuda.so.1" by default) and initializes it.
Status open_cuda_driver(const char* path, std::unique_ptr<Driver>* driver);

}  // namespace tasuki
