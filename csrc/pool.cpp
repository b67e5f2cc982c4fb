#include "pool.h"

#include <fcntl.h>
#include <unistd.h>

namespace tasuki {
namespace {

void close_all(std::vector<int>* fds) {
  for (int fd : *fds) close(fd);
  fds->clear();
}

Status no_descriptor(size_t num_needed) {
  return failure(Code::fd_limit, "a pool needs " + std::to_string(num_needed) + " more descriptors; raise the limit of open files (ulimit -n)");
}

}  // namespace

Status make_pool(Driver& driver, int device, size_t num_chunks, size_t chunk_bytes, std::vector<int>* fds) {
  size_t step = 0, free_bytes = 0, total_bytes = 0;
  Status status = driver.granularity(device, &step);
  if (status.ok()) status = driver.room(device, &free_bytes, &total_bytes);
  if (!status.ok()) return status;
  if (chunk_bytes == 0 || chunk_bytes % step != 0) {
    return failure(Code::bad_argument, "chunk_bytes: " + std::to_string(chunk_bytes) + " is no multiple of " + std::to_string(step));
  }
  if (num_chunks > free_bytes / chunk_bytes) return no_room("the pool", num_chunks * chunk_bytes, free_bytes);
  int table = -1;
  status = PoolTable::make(num_chunks, chunk_bytes, &table);
  if (!status.ok()) return status;
  fds->assign(1, table);
  for (size_t i = 0; status.ok() && i < num_chunks; ++i) {
    Physical chunk = 0;
    int fd = -1;
    status = driver.create(device, chunk_bytes, &chunk);
    if (!status.ok()) break;
    status = driver.commit(chunk);
    if (status.ok()) status = driver.export_fd(chunk, Access::read_write, &fd);
    if (status.ok()) fds->push_back(fd);
    // The descriptor keeps the memory alive.
    Status released = driver.release(chunk);
    if (status.ok()) status = released;
  }
  if (status.ok()) return {};
  size_t num_made = fds->size() - 1;
  close_all(fds);
  if (status.code != Code::out_of_memory) return status;
  return no_room("the pool", num_chunks * chunk_bytes, num_made * chunk_bytes);
}

Status Pool::open(Driver& driver, int device, const std::vector<int>& fds, const Owner& owner, std::unique_ptr<Pool>* pool) {
  if (fds.empty()) return failure(Code::bad_handle, "a pool has a descriptor of its table");
  if (owner.pid == 0) return failure(Code::bad_argument, "owner: no process has pid 0");
  std::unique_ptr<PoolTable> table;
  Status status = PoolTable::open(fds[0], &table);
  if (!status.ok()) return status;
  if (fds.size() - 1 != table->num_chunks()) {
    return failure(Code::bad_handle, std::to_string(fds.size() - 1) + " descriptors for the " + std::to_string(table->num_chunks()) +
                                         " chunks of a pool");
  }
  std::unique_ptr<Pool> made(new Pool(driver, owner, std::move(table)));
  for (size_t i = 0; i < made->table_->num_chunks(); ++i) {
    Physical chunk = 0;
    uint64_t identity = 0;
    status = driver.import_fd(device, fds[i + 1], made->chunk_bytes(), Access::read_write, &chunk);
    if (!status.ok()) return status.message = "chunk " + std::to_string(i) + " of the pool: " + status.message, status;
    made->physical_.push_back(chunk);
    if (!driver.exports_imports()) {
      int own = fcntl(fds[i + 1], F_DUPFD_CLOEXEC, 0);
      if (own < 0) return no_descriptor(made->table_->num_chunks());
      made->fds_.push_back(own);
    }
    if (driver.identify(fds[i + 1], &identity) || driver.identify_import(chunk, &identity)) made->by_identity_[identity] = i;
  }
  made->last_import_ = made->physical_.size();
  *pool = std::move(made);
  return {};
}

Pool::Pool(Driver& driver, const Owner& owner, std::unique_ptr<PoolTable> table)
    : driver_(driver), owner_(owner), opened_by_(getpid()), table_(std::move(table)), last_import_(0) {}

Pool::~Pool() {
  // A pool is closed with all chunks returned. A failure here cannot be reported, and is resolved when the process ends.
  for (Physical chunk : physical_) static_cast<void>(driver_.release(chunk));
  close_all(&fds_);
}

PoolUsage Pool::usage() const { return {table_->chunk_bytes(), table_->num_chunks(), table_->usage(), num_taken_}; }

Status Pool::room(int, size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = table_->usage().num_free * chunk_bytes();
  *total_bytes = table_->num_chunks() * chunk_bytes();
  return {};
}

Status Pool::create(int, size_t bytes, Physical* chunk) {
  Status status = check_process();
  if (!status.ok()) return status;
  if (bytes != chunk_bytes()) return failure(Code::bad_argument, "a pool lends whole chunks of " + readable(chunk_bytes()));
  size_t index = 0;
  if (!table_->take(owner_, &index)) return no_room("a chunk of the pool", bytes, 0);
  ++num_taken_;
  *chunk = index + 1;
  return {};
}

Status Pool::create_again(Physical before, Physical* chunk) {
  Status status = check_process();
  if (!status.ok()) return status;
  if (!table_->take_at(owner_, before - 1)) return failure(Code::not_found, "the chunk is not free");
  ++num_taken_;
  *chunk = before;
  return {};
}

Status Pool::release(Physical chunk) {
  auto imported = imported_.find(chunk);
  if (imported != imported_.end()) {
    Status status = imported->second.is_of_pool ? Status{} : driver_.release(imported->second.physical);
    if (!status.ok()) return status;
    if (imported->second.is_of_pool) table_->remove_reader(owner_, imported->second.index);
    imported_.erase(imported);
    return {};
  }
  if (!table_->give_back(owner_, chunk - 1)) return failure(Code::driver, "chunk " + std::to_string(chunk - 1) + " is not ours to give back");
  --num_taken_;
  return {};
}

// Read-only: a chunk has only one writable mapping, its owner's.
Status Pool::export_fd(Physical chunk, Access access, int* fd) {
  if (access != Access::read_only) return failure(Code::bad_argument, "access: chunks of a pool are handed out read-only");
  if (!table_->publish(owner_, chunk - 1)) return failure(Code::driver, "chunk " + std::to_string(chunk - 1) + " is not ours to publish");
  if (fds_.empty()) return driver_.export_fd(physical_[chunk - 1], access, fd);
  *fd = fcntl(fds_[chunk - 1], F_DUPFD_CLOEXEC, 0);
  return *fd < 0 ? no_descriptor(1) : Status{};
}

Status Pool::import_fd(int device, int fd, size_t bytes, Access access, Physical* chunk) {
  Status status = check_process();
  if (!status.ok()) return status;
  uint64_t identity = 0;
  auto found = driver_.identify(fd, &identity) ? by_identity_.find(identity) : by_identity_.end();
  if (found != by_identity_.end()) return read_own(found->second, bytes, access, chunk);
  Physical physical = 0;
  status = driver_.import_fd(device, fd, bytes, access, &physical);
  if (!status.ok()) return status;
  if (driver_.identify_import(physical, &identity)) found = by_identity_.find(identity);
  if (found == by_identity_.end()) return imported_[*chunk = ++last_import_] = {physical, false, 0}, Status{};
  status = driver_.release(physical);
  return status.ok() ? read_own(found->second, bytes, access, chunk) : status;
}

Status Pool::read(const SharedChunk& chunk, Access access, Physical* physical) {
  if (chunk.place.pool != table_->id()) return failure(Code::not_found, "the chunk is in another pool");
  Status status = check_process();
  if (!status.ok()) return status;
  uint64_t identity = 0;
  if (driver_.identify(chunk.fd, &identity)) {
    auto found = by_identity_.find(identity);
    if (found == by_identity_.end() || found->second != chunk.place.index) {
      return failure(Code::bad_handle, "its descriptor is not the chunk of the pool that it is said to be");
    }
  }
  return read_own(chunk.place.index, chunk.bytes, access, physical);
}

// Maps through the handle that the pool has had since it was opened.
Status Pool::read_own(size_t index, size_t bytes, Access access, Physical* chunk) {
  if (access != Access::read_only) return failure(Code::bad_handle, "a chunk of the pool is imported read-only");
  if (index >= physical_.size() || bytes != chunk_bytes()) {
    return failure(Code::bad_handle, "chunk " + std::to_string(index) + " of " + std::to_string(bytes) + " bytes is not in the pool of " +
                                         std::to_string(physical_.size()) + " chunks of " + std::to_string(chunk_bytes()) + " bytes");
  }
  Status status = table_->add_reader(owner_, index);
  if (status.ok()) imported_[*chunk = ++last_import_] = {physical_[index], true, index};
  return status;
}

Status Pool::map(uintptr_t address, size_t bytes, Physical chunk) {
  Status status = check_process();
  if (!status.ok()) return status;
  auto imported = imported_.find(chunk);
  if (imported != imported_.end()) return driver_.map(address, bytes, imported->second.physical);
  size_t index = chunk - 1;
  if (!table_->begin_map(owner_, index)) return failure(Code::driver, "chunk " + std::to_string(index) + " is not ours to map");
  status = driver_.map(address, bytes, physical_[index]);
  if (status.ok()) {
    mapped_[address] = index;
  } else {
    table_->end_map(owner_, index);
  }
  return status;
}

Status Pool::unmap(uintptr_t address, size_t bytes) {
  Status status = driver_.unmap(address, bytes);
  if (!status.ok()) return status;
  for (auto at = mapped_.lower_bound(address); at != mapped_.end() && at->first < address + bytes; at = mapped_.erase(at)) {
    table_->end_map(owner_, at->second);
  }
  return {};
}

// A forked child would take chunks in its parent's name and lose them when the parent ends.
Status Pool::check_process() const {
  if (getpid() == opened_by_) return {};
  return failure(Code::driver, "a pool belongs to the process that opened it: start others by spawn");
}

}  // namespace tasuki
