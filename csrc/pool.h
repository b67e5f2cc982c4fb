// A driver whose chunks are lent: created once per device, imported once by each process, and passed between processes through a table.
// Creating takes a chunk, releasing returns it; everything else goes to the underlying driver.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <vector>

#include "driver.h"
#include "pool_table.h"

namespace tasuki {

struct PoolUsage {
  uint64_t chunk_bytes;
  uint64_t num_chunks;
  TableUsage chunks;
  uint64_t num_ours;  // taken by this process
};

// Creates the chunks and their table. The caller owns the descriptors, the table's first, which keep the memory alive.
// out_of_memory with the numbers if the device lacks room for all of them.
Status make_pool(Driver& driver, int device, size_t num_chunks, size_t chunk_bytes, std::vector<int>* fds);

// Called with Memory's mutex held, like every driver that moves pages.
class Pool final : public Driver {
 public:
  // owner: this process, as seen by the process that reclaims. The caller keeps the descriptors.
  static Status open(Driver& driver, int device, const std::vector<int>& fds, const Owner& owner, std::unique_ptr<Pool>* pool);
  // Chunks still held are returned when the process ends.
  ~Pool() override;

  PoolUsage usage() const;
  size_t chunk_bytes() const { return table_->chunk_bytes(); }
  bool is_in_use() const { return num_taken_ != 0 || !imported_.empty(); }

  const char* name() const override { return driver_.name(); }
  Status granularity(int device, size_t* bytes) override { return driver_.granularity(device, bytes); }
  Status room(int device, size_t* free_bytes, size_t* total_bytes) override;
  Status reserve(int device, size_t bytes, uintptr_t* address) override { return driver_.reserve(device, bytes, address); }
  Status unreserve(uintptr_t address, size_t bytes) override { return driver_.unreserve(address, bytes); }

  Status create(int device, size_t bytes, Physical* chunk) override;
  Status create_again(Physical before, Physical* chunk) override;
  Status release(Physical chunk) override;
  Status export_fd(Physical chunk, Access access, int* fd) override;
  Status import_fd(int device, int fd, size_t bytes, Access access, Physical* chunk) override;
  bool imports_take_fds() const override { return driver_.imports_take_fds(); }
  bool identify(int fd, uint64_t* identity) override { return driver_.identify(fd, identity); }
  PoolPlace place_of(Physical chunk) const override { return {table_->id(), static_cast<uint32_t>(chunk - 1)}; }
  Status read(const SharedChunk& chunk, Access access, Physical* physical) override;
  Status map(uintptr_t address, size_t bytes, Physical chunk) override;
  Status allow(uintptr_t address, size_t bytes, int device, Access access) override { return driver_.allow(address, bytes, device, access); }
  Status unmap(uintptr_t address, size_t bytes) override;

  Status synchronize(int device) override { return driver_.synchronize(device); }
  Status pin(int device, size_t bytes, void** host) override { return driver_.pin(device, bytes, host); }
  Status unpin(int device, void* host, size_t bytes) override { return driver_.unpin(device, host, bytes); }
  Status copy_after(int device, uintptr_t stream) override { return driver_.copy_after(device, stream); }
  Status copy_to_host(int device, void* host, uintptr_t address, size_t bytes) override {
    return driver_.copy_to_host(device, host, address, bytes);
  }
  Status copy_from_host(int device, uintptr_t address, const void* host, size_t bytes) override {
    return driver_.copy_from_host(device, address, host, bytes);
  }
  Status mark(int device, Event* event) override { return driver_.mark(device, event); }
  Status wait(int device, Event event) override { return driver_.wait(device, event); }
  Status poll(int device, Event event, bool* is_reached) override { return driver_.poll(device, event, is_reached); }
  Status stream_after(int device, uintptr_t stream, Event event) override { return driver_.stream_after(device, stream, event); }
  void forget(int device, Event event) override { driver_.forget(device, event); }

 private:
  // Memory imported from another process; or `index`, a chunk of the pool that this process reads.
  struct Imported {
    Physical physical;
    bool is_of_pool;
    size_t index;
  };

  Pool(Driver& driver, const Owner& owner, std::unique_ptr<PoolTable> table);
  Status read_own(size_t index, size_t bytes, Access access, Physical* chunk);
  Status check_process() const;

  Driver& driver_;
  Owner owner_;
  pid_t opened_by_;
  std::unique_ptr<PoolTable> table_;
  std::vector<Physical> physical_;               // by chunk
  std::vector<int> fds_;                         // by chunk, of a driver that does not export what it has imported
  std::map<uint64_t, size_t> by_identity_;       // of chunks that the driver can identify
  std::map<Physical, Imported> imported_;        // by ids above those of the chunks
  std::map<uintptr_t, size_t> mapped_;           // address -> chunk
  Physical last_import_;
  size_t num_taken_ = 0;
};

}  // namespace tasuki
