#include <unistd.h>

#include "guarded.h"
#include "process.h"
#include "sums.h"
#include "tasuki_memory.h"

namespace tasuki {
namespace {

static_assert(static_cast<int>(Code::out_of_memory) == TASUKI_OUT_OF_MEMORY && static_cast<int>(Code::fd_limit) == TASUKI_FD_LIMIT &&
              static_cast<int>(Code::poisoned) == TASUKI_POISONED);
static_assert(static_cast<int>(State::paused) == TASUKI_ASLEEP && static_cast<int>(State::resuming) == TASUKI_RESUMING);

thread_local Status last_failure;

bool is_access(int access) { return access == TASUKI_READ_ONLY || access == TASUKI_READ_WRITE; }
Access to_access(int access) { return access == TASUKI_READ_ONLY ? Access::read_only : Access::read_write; }

Memory::Ids to_ids(const uint64_t* arenas, size_t num_arenas) { return Memory::Ids(arenas, arenas + num_arenas); }

std::vector<SharedChunk> to_chunks(const tasuki_chunk* chunks, size_t num_chunks) {
  std::vector<SharedChunk> shared;
  for (size_t i = 0; i < num_chunks; ++i) shared.push_back({chunks[i].offset, chunks[i].bytes, chunks[i].fd});
  return shared;
}

Status check_ids(const uint64_t* arenas, size_t num_arenas) {
  return arenas == nullptr && num_arenas != 0 ? bad("arenas: null") : Status{};
}

}  // namespace

Process::Process() {
  std::unique_ptr<HostDriver> driver = make_host_driver();
  host = driver.get();
  static_cast<void>(memory.set_driver(DriverKind::host, std::move(driver)));
}

Process& process() {
  static Process* made = new Process();
  return *made;
}

int report(const Status& status) {
  if (!status.ok()) last_failure = status;
  return static_cast<int>(status.code);
}

int report_no_memory() {
  last_failure = Status{};  // storing a message would need memory
  return TASUKI_OUT_OF_MEMORY;
}

}  // namespace tasuki

using namespace tasuki;

int tasuki_abi_version(void) { return TASUKI_ABI_VERSION; }

int tasuki_copy_and_sum(const tasuki_block* blocks, size_t num_blocks, uint64_t* sums, size_t num_sums, uint32_t num_threads) {
  return guarded([&]() -> Status {
    if (num_blocks != 0 && (blocks == nullptr || sums == nullptr)) return bad("blocks, sums: null");
    return copy_and_sum(blocks, num_blocks, sums, num_sums, num_threads);
  });
}

const char* tasuki_last_error(void) { return last_failure.message.c_str(); }

void tasuki_last_room(uint64_t* needed_bytes, uint64_t* free_bytes) {
  *needed_bytes = last_failure.needed_bytes;
  *free_bytes = last_failure.free_bytes;
}

int tasuki_open_cuda(const char* path) {
  return guarded([&]() -> Status {
    if (process().memory.has_driver(DriverKind::cuda)) return {};
    std::unique_ptr<Driver> driver;
    Status status = open_cuda_driver(path, &driver);
    if (!status.ok()) return status;
    status = process().memory.set_driver(DriverKind::cuda, std::move(driver));
    return status.code == Code::busy ? Status{} : status;  // another thread was faster
  });
}

int tasuki_set_host_budget(uint64_t bytes) {
  return guarded([&]() -> Status { return process().host->set_budget(bytes), Status{}; });
}

int tasuki_create_arena(int driver, const char* tag, int device, const tasuki_arena_options* options, uint64_t* arena) {
  return guarded([&]() -> Status {
    if (tag == nullptr || options == nullptr || arena == nullptr) return bad("tag, options, arena: null");
    if (!is_driver(driver)) return bad("driver: neither TASUKI_HOST nor TASUKI_CUDA");
    if (device < 0) return bad("device: below zero");
    ArenaOptions sizes{options->capacity_bytes, options->min_chunk_bytes, options->max_chunk_bytes};
    return process().memory.create_arena(static_cast<DriverKind>(driver), tag, device, sizes, arena);
  });
}

int tasuki_destroy_arena(uint64_t arena) {
  return guarded([&] { return process().memory.destroy_arena(arena); });
}

int tasuki_allocate(uint64_t arena, uint64_t bytes, void** address) {
  return guarded([&]() -> Status {
    if (address == nullptr) return bad("address: null");
    uintptr_t got = 0;
    Status status = process().memory.allocate(arena, bytes, &got);
    *address = reinterpret_cast<void*>(got);
    return status;
  });
}

int tasuki_free(void* address) {
  return guarded([&] { return process().memory.release(reinterpret_cast<uintptr_t>(address)); });
}

int tasuki_freeze(void* address, uint64_t bytes, int* is_ours) {
  return guarded([&]() -> Status {
    if (is_ours == nullptr) return bad("is_ours: null");
    bool is_found = false;
    Status status = process().memory.freeze(reinterpret_cast<uintptr_t>(address), bytes, &is_found);
    *is_ours = is_found;
    return status;
  });
}

int tasuki_save_frozen(uint64_t arena) {
  return guarded([&] { return process().memory.save_frozen(arena); });
}

int tasuki_restore_frozen(uint64_t arena) {
  return guarded([&] { return process().memory.restore_frozen(arena); });
}

int tasuki_reserve_host(uint64_t arena, uint64_t total_bytes, uint64_t max_bytes, uint64_t* missing_bytes) {
  return guarded([&]() -> Status {
    if (missing_bytes == nullptr || max_bytes == 0) return bad("missing_bytes: null, or max_bytes: 0");
    size_t missing = 0;
    Status status = process().memory.reserve_host(arena, total_bytes, max_bytes, &missing);
    *missing_bytes = missing;
    return status;
  });
}

int tasuki_set_policy(uint64_t arena, uint32_t flags) {
  return guarded([&]() -> Status {
    if ((flags & ~static_cast<uint32_t>(TASUKI_KEEP_CONTENT | TASUKI_KEEP_CHUNKS)) != 0) return bad("flags: unknown bits");
    return process().memory.set_policy(arena, {(flags & TASUKI_KEEP_CONTENT) != 0, (flags & TASUKI_KEEP_CHUNKS) != 0});
  });
}

int tasuki_pause(const uint64_t* arenas, size_t num_arenas, uint64_t* given_back_bytes) {
  return guarded([&]() -> Status {
    if (given_back_bytes == nullptr) return bad("given_back_bytes: null");
    *given_back_bytes = 0;
    Status status = check_ids(arenas, num_arenas);
    return status.ok() ? process().memory.pause(to_ids(arenas, num_arenas), given_back_bytes) : status;
  });
}

int tasuki_resume(const uint64_t* arenas, size_t num_arenas, uint64_t* mapped_bytes) {
  return guarded([&]() -> Status {
    if (mapped_bytes == nullptr) return bad("mapped_bytes: null");
    *mapped_bytes = 0;
    Status status = check_ids(arenas, num_arenas);
    return status.ok() ? process().memory.resume(to_ids(arenas, num_arenas), mapped_bytes) : status;
  });
}

int tasuki_resume_async(const uint64_t* arenas, size_t num_arenas, uint64_t* ticket) {
  return guarded([&]() -> Status {
    if (ticket == nullptr) return bad("ticket: null");
    Status status = check_ids(arenas, num_arenas);
    return status.ok() ? process().memory.resume_async(to_ids(arenas, num_arenas), ticket) : status;
  });
}

int tasuki_wait(uint64_t ticket, uint64_t* bytes) {
  return guarded([&]() -> Status { return bytes == nullptr ? bad("bytes: null") : process().memory.wait(ticket, bytes); });
}

int tasuki_stream_after(uint64_t ticket, void* stream, const void* address, size_t bytes) {
  return guarded([&] {
    return process().memory.stream_after(ticket, reinterpret_cast<uintptr_t>(stream), reinterpret_cast<uintptr_t>(address), bytes);
  });
}

int tasuki_get_usage(uint64_t arena, tasuki_usage* usage) {
  return guarded([&]() -> Status {
    if (usage == nullptr) return bad("usage: null");
    Usage now{};
    Status status = process().memory.usage(arena, &now);
    *usage = {now.used_bytes,      now.total_bytes,    now.mapped_bytes, now.kept_bytes, now.host_copy_bytes,
              now.exported_bytes,  now.held_bytes,     now.num_chunks,   now.num_blocks, static_cast<uint64_t>(now.state)};
    return status;
  });
}

int tasuki_get_totals(tasuki_totals* totals) {
  return guarded([&]() -> Status {
    if (totals == nullptr) return bad("totals: null");
    Totals now = process().memory.totals();
    *totals = {now.num_arenas,  now.mapped_bytes, now.kept_bytes,    now.host_copy_bytes,        now.imported_bytes,
               now.num_imports, now.num_exports,  now.num_transfers, process().num_refused_frees};
    return {};
  });
}

int tasuki_export(uint64_t arena, int access, tasuki_chunk* chunks, size_t capacity, size_t* num_chunks, void** base,
                  uint64_t* export_id) {
  return guarded([&]() -> Status {
    if (num_chunks == nullptr || base == nullptr || export_id == nullptr) return bad("num_chunks, base, export_id: null");
    if (!is_access(access)) return bad("access: neither TASUKI_READ_ONLY nor TASUKI_READ_WRITE");
    Usage usage{};
    Status status = process().memory.usage(arena, &usage);
    if (!status.ok()) return status;
    *num_chunks = usage.num_chunks;
    if (usage.num_chunks > capacity || chunks == nullptr) return bad("capacity: too small for the arena's chunks");
    std::vector<SharedChunk> shared;
    uintptr_t start = 0;
    status = process().memory.export_arena(arena, to_access(access), capacity, &shared, &start, export_id);
    if (!status.ok()) return status;
    for (size_t i = 0; i < shared.size(); ++i) chunks[i] = {shared[i].offset, shared[i].bytes, shared[i].fd};
    *num_chunks = shared.size();
    *base = reinterpret_cast<void*>(start);
    return {};
  });
}

int tasuki_close_export(uint64_t export_id) {
  return guarded([&] { return process().memory.close_export(export_id); });
}

int tasuki_import(int driver, int device, int access, const tasuki_chunk* chunks, size_t num_chunks, uint64_t* import_id, void** base) {
  return guarded([&]() -> Status {
    if (import_id == nullptr || base == nullptr || (chunks == nullptr && num_chunks != 0)) return bad("chunks, import_id, base: null");
    if (!is_driver(driver)) return bad("driver: neither TASUKI_HOST nor TASUKI_CUDA");
    if (!is_access(access)) return bad("access: neither TASUKI_READ_ONLY nor TASUKI_READ_WRITE");
    uintptr_t start = 0;
    Status status = process().memory.open_import(static_cast<DriverKind>(driver), device, to_access(access), to_chunks(chunks, num_chunks),
                                                 import_id, &start);
    *base = reinterpret_cast<void*>(start);
    return status;
  });
}

int tasuki_release_import(uint64_t import_id) {
  return guarded([&] { return process().memory.release_import(import_id); });
}

int tasuki_renew_import(uint64_t import_id, const tasuki_chunk* chunks, size_t num_chunks) {
  return guarded([&]() -> Status {
    if (chunks == nullptr && num_chunks != 0) return bad("chunks: null");
    return process().memory.renew_import(import_id, to_chunks(chunks, num_chunks));
  });
}

int tasuki_close_import(uint64_t import_id) {
  return guarded([&] { return process().memory.close_import(import_id); });
}
