// Pools of this process, and the arenas and imports that use them.
#include <algorithm>

#include "memory.h"

namespace tasuki {
namespace {

using Lock = std::lock_guard<std::mutex>;

}  // namespace

Status Memory::room(DriverKind kind, int device, size_t* free_bytes, size_t* total_bytes) {
  Lock lock(mutex_);
  Driver* driver = pool_of(kind, device);
  Status status = driver != nullptr ? Status{} : driver_of(kind, &driver);
  return status.ok() ? driver->room(device, free_bytes, total_bytes) : status;
}

Status Memory::make_pool(DriverKind kind, int device, size_t num_chunks, size_t chunk_bytes, std::vector<int>* fds) {
  Lock lock(mutex_);
  Driver* driver = nullptr;
  Status status = driver_of(kind, &driver);
  return status.ok() ? tasuki::make_pool(*driver, device, num_chunks, chunk_bytes, fds) : status;
}

Status Memory::open_pool(DriverKind kind, int device, const std::vector<int>& fds, const Owner& owner) {
  Lock lock(mutex_);
  Driver* driver = nullptr;
  Status status = driver_of(kind, &driver);
  if (!status.ok()) return status;
  bool has_arenas = std::any_of(arenas_.begin(), arenas_.end(), [&](const auto& one) {
    return &one.second->driver() == driver && one.second->device() == device;
  });
  if (has_arenas || pool_of(kind, device) != nullptr) return failure(Code::busy, "the device has a pool, or arenas outside of one");
  std::unique_ptr<Pool> pool;
  status = Pool::open(*driver, device, fds, owner, &pool);
  if (status.ok()) pools_[{kind, device}] = std::move(pool);
  return status;
}

Status Memory::close_pool(DriverKind kind, int device) {
  Lock lock(mutex_);
  Pool* pool = pool_of(kind, device);
  if (pool == nullptr) return failure(Code::not_found, "the device has no pool here");
  bool has_arenas = std::any_of(arenas_.begin(), arenas_.end(), [&](const auto& one) { return &one.second->driver() == pool; });
  bool has_imports = std::any_of(imports_.begin(), imports_.end(), [&](const auto& one) { return &one.second->driver() == pool; });
  if (has_arenas || has_imports || pool->is_in_use()) return failure(Code::busy, "arenas or imports still use the pool");
  pools_.erase({kind, device});
  return {};
}

Status Memory::pool_usage(DriverKind kind, int device, PoolUsage* usage) {
  Lock lock(mutex_);
  Pool* pool = pool_of(kind, device);
  if (pool == nullptr) return failure(Code::not_found, "the device has no pool here");
  *usage = pool->usage();
  return {};
}

Pool* Memory::pool_of(DriverKind kind, int device) {
  auto found = pools_.find({kind, device});
  return found == pools_.end() ? nullptr : found->second.get();
}

}  // namespace tasuki
