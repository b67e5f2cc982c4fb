// A driver made of bookkeeping: every call can be made to fail, copies happen late, and breaking a rule of CUDA ends the test.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "../driver.h"

namespace tasuki {

constexpr size_t kPage = 4096;

class FakeDriver final : public Driver {
 public:
  struct PhysicalChunk {
    std::vector<unsigned char> content;
    int num_mappings = 0;
    int num_references = 1;
  };
  struct Mapping {
    size_t bytes;
    Physical physical;
    bool is_allowed;
    bool is_writable;
  };

  size_t total_bytes = size_t{1} << 30;
  std::map<Physical, PhysicalChunk> chunks;
  std::map<uintptr_t, Mapping> mappings;
  std::map<uintptr_t, size_t> reservations;
  std::map<void*, size_t> pinned;
  std::map<Event, size_t> events;  // with the copies before each
  std::vector<size_t> copies_waited_for;  // by every stream_after
  std::vector<std::string> calls;

  // Fails `call` after it has succeeded `after` more times, `count` times in a row.
  void fail(const std::string& call, int after, int count = 1, Code code = Code::driver) { injections_[call] = {after, count, code}; }
  void fail_no_more() { injections_.clear(); }
  bool is_failure_pending(const std::string& call) const { return injections_.count(call) != 0; }
  size_t used_bytes() const {
    size_t bytes = 0;
    for (const auto& [id, chunk] : chunks) bytes += chunk.content.size();
    return bytes;
  }
  // The byte at a mapped address.
  unsigned char& at(uintptr_t address) {
    auto [start, mapping] = find(address, 1);
    return chunks.at(mapping->physical).content[address - start];
  }
  bool is_mapped(uintptr_t address) const {
    auto after = mappings.upper_bound(address);
    return after != mappings.begin() && std::prev(after)->first + std::prev(after)->second.bytes > address;
  }

  const char* name() const override { return "fake"; }
  Status granularity(int, size_t* bytes) override { return *bytes = kPage, Status{}; }
  Status room(int, size_t* free_bytes, size_t* total) override {
    *free_bytes = total_bytes - used_bytes();
    *total = total_bytes;
    return outcome("room");
  }
  Status reserve(int, size_t bytes, uintptr_t* address) override {
    Status status = outcome("reserve");
    if (!status.ok()) return status;
    *address = next_address_;
    next_address_ += bytes + kPage;
    reservations[*address] = bytes;
    return {};
  }
  Status unreserve(uintptr_t address, size_t bytes) override {
    rule(reservations.count(address) == 1 && reservations[address] == bytes, "unreserve what was reserved");
    for (const auto& [start, mapping] : mappings) rule(start < address || start >= address + bytes, "unreserve nothing mapped");
    reservations.erase(address);
    return outcome("unreserve");
  }
  Status create(int, size_t bytes, Physical* chunk) override {
    Status status = outcome("create");
    if (!status.ok()) return status;
    if (used_bytes() + bytes > total_bytes) return failure(Code::out_of_memory, "fake memory is full");
    *chunk = ++last_physical_;
    chunks[*chunk].content.assign(bytes, 0xEE);  // what was there before, as on a GPU
    return {};
  }
  Status release(Physical chunk) override {
    Status status = outcome("release");
    if (!status.ok()) return status;
    rule(chunks.count(chunk) == 1, "release what was created");
    rule(chunks[chunk].num_mappings == 0 || chunks[chunk].num_references > 1, "release nothing mapped");
    if (--chunks[chunk].num_references == 0) chunks.erase(chunk);
    return {};
  }
  Status export_fd(Physical chunk, Access, int* fd) override {
    Status status = outcome("export_fd");
    if (status.ok()) *fd = static_cast<int>(chunk) + 100000;  // nothing to close
    return status;
  }
  Status import_fd(int, int fd, size_t bytes, Access, Physical* chunk) override {
    Status status = outcome("import_fd");
    if (!status.ok()) return status;
    auto found = chunks.find(static_cast<Physical>(fd - 100000));
    if (found == chunks.end() || found->second.content.size() != bytes) return failure(Code::bad_handle, "no such fake chunk");
    ++found->second.num_references;
    *chunk = found->first;
    return {};
  }
  Status map(uintptr_t address, size_t bytes, Physical chunk) override {
    Status status = outcome("map");
    if (!status.ok()) return status;
    rule(chunks.count(chunk) == 1 && chunks[chunk].content.size() == bytes, "map a whole chunk");
    rule(!is_mapped(address) && !is_mapped(address + bytes - 1), "map onto free addresses");
    mappings[address] = {bytes, chunk, false, false};
    ++chunks[chunk].num_mappings;
    return {};
  }
  Status allow(uintptr_t address, size_t bytes, int, Access access) override {
    Status status = outcome("allow");
    if (!status.ok()) return status;
    size_t covered = 0;
    for (auto& [start, mapping] : mappings) {
      if (start < address || start >= address + bytes) continue;
      mapping.is_allowed = true;
      mapping.is_writable = access == Access::read_write;
      covered += mapping.bytes;
    }
    rule(covered == bytes, "allow what is mapped");
    return {};
  }
  Status unmap(uintptr_t address, size_t bytes) override {
    Status status = outcome("unmap");
    if (!status.ok()) return status;
    rule(late_copies_.empty(), "unmap after the copies");
    size_t covered = 0;
    for (auto it = mappings.lower_bound(address); it != mappings.end() && it->first < address + bytes;) {
      covered += it->second.bytes;
      --chunks.at(it->second.physical).num_mappings;
      it = mappings.erase(it);
    }
    rule(covered == bytes, "unmap what is mapped");
    return {};
  }
  Status synchronize(int) override {
    Status status = outcome("synchronize");
    if (status.ok()) run_copies();
    return status;
  }
  Status pin(int, size_t bytes, void** host) override {
    Status status = outcome("pin");
    if (!status.ok()) return status;
    pinned[*host = std::malloc(bytes)] = bytes;
    return {};
  }
  Status unpin(int, void* host, size_t bytes) override {
    rule(pinned.count(host) == 1 && pinned[host] == bytes, "unpin what was pinned");
    pinned.erase(host);
    std::free(host);
    return outcome("unpin");
  }
  Status copy_to_host(int, void* host, uintptr_t address, size_t bytes) override {
    Status status = outcome("copy_to_host");
    if (status.ok()) late_copies_.push_back([this, host, address, bytes] { copy(address, static_cast<char*>(host), bytes, true); });
    return status;
  }
  Status copy_from_host(int, uintptr_t address, const void* host, size_t bytes) override {
    Status status = outcome("copy_from_host");
    char* from = static_cast<char*>(const_cast<void*>(host));
    if (status.ok()) late_copies_.push_back([this, from, address, bytes] { copy(address, from, bytes, false); });
    return status;
  }
  Status mark(int, Event* event) override {
    Status status = outcome("mark");
    if (status.ok()) events[*event = ++last_event_] = late_copies_.size();
    return status;
  }
  Status wait(int, Event event) override {
    rule(events.count(event) == 1, "wait for a known event");
    Status status = outcome("wait");
    run_copies();
    return status;
  }
  Status stream_after(int, uintptr_t, Event event) override {
    rule(events.count(event) == 1, "a stream waits for a known event");
    copies_waited_for.push_back(events[event]);
    return outcome("stream_after");
  }
  void forget(int, Event event) override { events.erase(event); }

 private:
  Status outcome(const char* call) {
    calls.push_back(call);
    auto found = injections_.find(call);
    if (found == injections_.end() || found->second.after-- > 0) return {};
    Code code = found->second.code;
    found->second.after = 0;
    if (--found->second.count == 0) injections_.erase(found);
    return failure(code, std::string("injected into ") + call);
  }

  std::pair<uintptr_t, Mapping*> find(uintptr_t address, size_t) {
    rule(is_mapped(address), "touch what is mapped");
    auto it = std::prev(mappings.upper_bound(address));
    rule(it->second.is_allowed, "touch what is allowed");
    return {it->first, &it->second};
  }

  void copy(uintptr_t address, char* host, size_t bytes, bool is_to_host) {
    for (size_t i = 0; i < bytes; ++i) {
      if (is_to_host) {
        host[i] = static_cast<char>(at(address + i));
      } else {
        at(address + i) = static_cast<unsigned char>(host[i]);
      }
    }
  }

  void run_copies() {
    for (auto& one : late_copies_) one();
    late_copies_.clear();
  }

  static void rule(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "a driver rule was broken: %s\n", what);
    std::abort();
  }

  struct Injection {
    int after;
    int count;
    Code code;
  };
  std::map<std::string, Injection> injections_;
  uintptr_t next_address_ = uintptr_t{1} << 40;
  Physical last_physical_ = 0;
  Event last_event_ = 0;
  std::vector<std::function<void()>> late_copies_;
};

}  // namespace tasuki
