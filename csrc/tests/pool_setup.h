// A pool of small host chunks, and a Memory with one arena over it for each side that takes part.
#pragma once

#include <unistd.h>

#include <memory>
#include <vector>

#include "../memory.h"
#include "check.h"

namespace tasuki {

inline constexpr size_t kChunk = size_t{64} << 10;

struct PoolSetup {
  std::vector<int> fds;
  std::unique_ptr<PoolTable> table;
  explicit PoolSetup(size_t num_chunks) {
    CHECK_OK(make_pool(*make_host_driver(), 0, num_chunks, kChunk, &fds));
    CHECK_OK(PoolTable::open(fds[0], &table));
  }
  ~PoolSetup() {
    for (int fd : fds) close(fd);
  }
  TableUsage usage() const { return table->usage(); }
};

struct Side {
  Memory memory;
  uint64_t arena = 0;
  Side(const PoolSetup& setup, const Owner& self) {
    CHECK_OK(memory.set_driver(DriverKind::host, make_host_driver()));
    CHECK_OK(memory.open_pool(DriverKind::host, 0, setup.fds, self));
    CHECK_OK(memory.create_arena(DriverKind::host, "weights", 0, {}, &arena));
  }
  unsigned char* block_or_null(size_t num_chunks) {
    uintptr_t address = 0;
    return memory.allocate(arena, num_chunks * kChunk, &address).ok() ? reinterpret_cast<unsigned char*>(address) : nullptr;
  }
  unsigned char* block(size_t num_chunks) {
    unsigned char* block = block_or_null(num_chunks);
    CHECK(block != nullptr);
    return block;
  }
  uint64_t pause() {
    uint64_t bytes = 0;
    CHECK_OK(memory.pause({arena}, &bytes));
    return bytes;
  }
  Status resume() {
    uint64_t bytes = 0;
    return memory.resume({arena}, &bytes);
  }
};

}  // namespace tasuki
