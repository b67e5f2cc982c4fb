// The C functions of pools.
#include <algorithm>

#include "guarded.h"

using namespace tasuki;

namespace {

tasuki_pool_usage to_usage(const PoolUsage& now) {
  return {now.chunk_bytes,       now.num_chunks,           now.chunks.num_free, now.chunks.num_lent,
          now.chunks.num_mapped, now.chunks.num_published, now.chunks.num_read, now.num_ours};
}

}  // namespace

int tasuki_get_room(int driver, int device, uint64_t* free_bytes, uint64_t* total_bytes) {
  return guarded([&]() -> Status {
    if (free_bytes == nullptr || total_bytes == nullptr) return bad("free_bytes, total_bytes: null");
    if (!is_driver(driver)) return bad("driver: neither TASUKI_HOST nor TASUKI_CUDA");
    size_t free_now = 0, total = 0;
    Status status = process().memory.room(static_cast<DriverKind>(driver), device, &free_now, &total);
    *free_bytes = free_now;
    *total_bytes = total;
    return status;
  });
}

int tasuki_make_pool(int driver, int device, uint64_t num_chunks, uint64_t chunk_bytes, int* fds) {
  return guarded([&]() -> Status {
    if (fds == nullptr) return bad("fds: null");
    if (!is_driver(driver)) return bad("driver: neither TASUKI_HOST nor TASUKI_CUDA");
    std::vector<int> made;
    Status status = process().memory.make_pool(static_cast<DriverKind>(driver), device, num_chunks, chunk_bytes, &made);
    std::copy(made.begin(), made.end(), fds);
    return status;
  });
}

int tasuki_open_pool(int driver, int device, const int* fds, size_t num_fds, uint32_t pid, uint64_t start) {
  return guarded([&]() -> Status {
    if (fds == nullptr) return bad("fds: null");
    if (!is_driver(driver)) return bad("driver: neither TASUKI_HOST nor TASUKI_CUDA");
    return process().memory.open_pool(static_cast<DriverKind>(driver), device, std::vector<int>(fds, fds + num_fds), {pid, start});
  });
}

int tasuki_close_pool(int driver, int device) {
  return guarded([&] { return process().memory.close_pool(static_cast<DriverKind>(driver), device); });
}

int tasuki_get_pool(int driver, int device, tasuki_pool_usage* usage) {
  return guarded([&]() -> Status {
    if (usage == nullptr) return bad("usage: null");
    PoolUsage now{};
    Status status = process().memory.pool_usage(static_cast<DriverKind>(driver), device, &now);
    *usage = to_usage(now);
    return status.code == Code::not_found ? Status{} : status;
  });
}

int tasuki_read_pool(int table_fd, tasuki_pool_usage* usage) {
  return guarded([&]() -> Status {
    if (usage == nullptr) return bad("usage: null");
    std::unique_ptr<PoolTable> table;
    Status status = PoolTable::open(table_fd, &table);
    if (status.ok()) *usage = to_usage({table->chunk_bytes(), table->num_chunks(), table->usage(), 0});
    return status;
  });
}

int tasuki_reclaim_pool(int table_fd, uint64_t* num_freed) {
  return guarded([&]() -> Status {
    if (num_freed == nullptr) return bad("num_freed: null");
    std::unique_ptr<PoolTable> table;
    Status status = PoolTable::open(table_fd, &table);
    *num_freed = status.ok() ? table->reclaim(is_certainly_dead) : 0;
    return status;
  });
}

int tasuki_identify_process(uint32_t pid, uint64_t* start) {
  return guarded([&]() -> Status {
    if (start == nullptr) return bad("start: null");
    Owner owner;
    Status status = identify(pid, &owner);
    *start = owner.start;
    return status;
  });
}
