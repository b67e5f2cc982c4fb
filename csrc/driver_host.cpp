// Host memory: a physical chunk is a sealed memfd; mapping is mmap(MAP_FIXED) into a reserved, inaccessible range.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "driver.h"

namespace tasuki {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr size_t kHugePage = size_t{2} << 20;

struct HostChunk {
  int fd;
  size_t bytes;
  bool is_imported;
};

Status os_failure(const char* call, int error) {
  Code code = Code::driver;
  if (error == ENOMEM) code = Code::out_of_memory;
  if (error == EMFILE || error == ENFILE) code = Code::fd_limit;
  std::string hint = code == Code::fd_limit ? "; raise the limit of open files (ulimit -n) or use larger chunks" : "";
  return failure(code, std::string(call) + ": " + std::strerror(error) + hint);
}

void* reserve_at(uintptr_t address, size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (address != 0 ? MAP_FIXED : 0);
  return mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, flags, -1, 0);
}

uint64_t available_bytes() {
  FILE* file = std::fopen("/proc/meminfo", "re");
  if (file == nullptr) return 0;
  char line[128];
  unsigned long long kib = 0;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) break;
  }
  std::fclose(file);
  return static_cast<uint64_t>(kib) << 10;
}

class MemfdDriver final : public HostDriver {
 public:
  const char* name() const override { return "host"; }
  void set_budget(uint64_t bytes) override { budget_bytes_ = bytes; }

  Status granularity(int, size_t* bytes) override {
    *bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return {};
  }

  Status room(int, size_t* free_bytes, size_t* total_bytes) override {
    struct sysinfo machine;
    if (sysinfo(&machine) != 0) return os_failure("sysinfo", errno);
    uint64_t budget = budget_bytes_, created = created_bytes_;
    *total_bytes = budget != 0 ? budget : static_cast<uint64_t>(machine.totalram) * machine.mem_unit;
    *free_bytes = budget == 0 ? available_bytes() : budget > created ? budget - created : 0;
    return {};
  }

  Status reserve(int, size_t bytes, uintptr_t* address) override {
    void* start = reserve_at(0, bytes);
    if (start == MAP_FAILED) return os_failure("mmap of an address range", errno);
    *address = reinterpret_cast<uintptr_t>(start);
    return {};
  }

  Status unreserve(uintptr_t address, size_t bytes) override {
    if (munmap(reinterpret_cast<void*>(address), bytes) != 0) return os_failure("munmap", errno);
    return {};
  }

  Status create(int, size_t bytes, Physical* chunk) override {
    uint64_t budget = budget_bytes_, created = created_bytes_;
    if (budget != 0 && created + bytes > budget) return no_room("a chunk", bytes, budget > created ? budget - created : 0);
    int fd = memfd_create("tasuki", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return os_failure("memfd_create", errno);
    // Sealed, so that nobody can shrink the file and so kill importers with SIGBUS.
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 || fcntl(fd, F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) {
      Status status = os_failure("sizing a memfd", errno);
      close(fd);
      return status;
    }
    created_bytes_ += bytes;
    *chunk = reinterpret_cast<Physical>(new HostChunk{fd, bytes, false});
    return {};
  }

  Status release(Physical chunk) override {
    HostChunk* host_chunk = reinterpret_cast<HostChunk*>(chunk);
    close(host_chunk->fd);
    if (!host_chunk->is_imported) created_bytes_ -= host_chunk->bytes;
    delete host_chunk;
    return {};
  }

  // A second open of the file, so that the receiver of a read-only descriptor cannot map it for writing.
  Status export_fd(Physical chunk, Access access, int* fd) override {
    std::string path = "/proc/self/fd/" + std::to_string(reinterpret_cast<HostChunk*>(chunk)->fd);
    *fd = open(path.c_str(), (access == Access::read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
    return *fd < 0 ? os_failure("exporting a chunk", errno) : Status{};
  }

  Status import_fd(int, int fd, size_t bytes, Access access, Physical* chunk) override {
    struct stat file;
    if (fstat(fd, &file) != 0) return failure(Code::bad_handle, "not an open file descriptor");
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return failure(Code::bad_handle, "not a sealed memfd: its owner could shrink it");
    if (static_cast<size_t>(file.st_size) != bytes) {
      return failure(Code::bad_handle, "the file holds " + std::to_string(file.st_size) + " bytes, the handle says " + std::to_string(bytes));
    }
    if (access == Access::read_write && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR) {
      return failure(Code::bad_handle, "the chunk was exported read-only");
    }
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) return os_failure("importing a chunk", errno);
    *chunk = reinterpret_cast<Physical>(new HostChunk{own, bytes, true});
    return {};
  }

  Status map(uintptr_t address, size_t bytes, Physical chunk) override {
    HostChunk* host_chunk = reinterpret_cast<HostChunk*>(chunk);
    void* got = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, host_chunk->fd, 0);
    if (got == MAP_FAILED) return os_failure("mmap of a chunk", errno);
    // A forked child would keep the memory after we have released it.
    if (host_chunk->is_imported && madvise(got, bytes, MADV_DONTFORK) != 0) return os_failure("madvise of a chunk", errno);
    return {};
  }

  Status allow(uintptr_t address, size_t bytes, int, Access access) override {
    int protection = access == Access::read_only ? PROT_READ : PROT_READ | PROT_WRITE;
    if (mprotect(reinterpret_cast<void*>(address), bytes, protection) != 0) return os_failure("mprotect", errno);
    // Requests 2 MiB pages instead of 4 KiB where available; a refusal costs only speed.
    if (bytes >= kHugePage) static_cast<void>(madvise(reinterpret_cast<void*>(address), bytes, MADV_HUGEPAGE));
    return {};
  }

  Status unmap(uintptr_t address, size_t bytes) override {
    return reserve_at(address, bytes) == MAP_FAILED ? os_failure("mmap without access", errno) : Status{};
  }

  Status synchronize(int) override { return {}; }

  Status pin(int, size_t bytes, void** host) override {
    *host = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return *host == MAP_FAILED ? os_failure("mmap of a host copy", errno) : Status{};
  }

  Status unpin(int, void* host, size_t bytes) override {
    return munmap(host, bytes) != 0 ? os_failure("munmap of a host copy", errno) : Status{};
  }

  // Copies are synchronous, so every event has been reached.
  Status copy_to_host(int, void* host, uintptr_t address, size_t bytes) override {
    std::memcpy(host, reinterpret_cast<const void*>(address), bytes);
    return {};
  }
  Status copy_from_host(int, uintptr_t address, const void* host, size_t bytes) override {
    std::memcpy(reinterpret_cast<void*>(address), host, bytes);
    return {};
  }
  Status mark(int, Event* event) override { return *event = 0, Status{}; }
  Status wait(int, Event) override { return {}; }
  Status stream_after(int, uintptr_t, Event) override { return {}; }
  void forget(int, Event) override {}

 private:
  std::atomic<uint64_t> budget_bytes_{0};
  std::atomic<uint64_t> created_bytes_{0};
};

}  // namespace

std::unique_ptr<HostDriver> make_host_driver() { return std::make_unique<MemfdDriver>(); }

}  // namespace tasuki
