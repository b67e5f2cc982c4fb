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

struct SharedChunk {
  uint64_t offset;
  uint64_t bytes;
  int fd;
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
  virtual Status release(Physical chunk) = 0;
  virtual Status export_fd(Physical chunk, Access access, int* fd) = 0;
  virtual Status import_fd(int device, int fd, size_t bytes, Access access, Physical* chunk) = 0;

  // Mapping: map, then set access; unmap may cover several adjacent chunks.
  virtual Status map(uintptr_t address, size_t bytes, Physical chunk) = 0;
  virtual Status allow(uintptr_t address, size_t bytes, int device, Access access) = 0;
  virtual Status unmap(uintptr_t address, size_t bytes) = 0;

  // Waits until the device is idle.
  virtual Status synchronize(int device) = 0;

  // Pinned host memory, and copies on one side stream per device.
  virtual Status pin(int device, size_t bytes, void** host) = 0;
  virtual Status unpin(int device, void* host, size_t bytes) = 0;
  virtual Status copy_to_host(int device, void* host, uintptr_t address, size_t bytes) = 0;
  virtual Status copy_from_host(int device, uintptr_t address, const void* host, size_t bytes) = 0;
  virtual Status mark(int device, Event* event) = 0;
  virtual Status wait(int device, Event event) = 0;
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
