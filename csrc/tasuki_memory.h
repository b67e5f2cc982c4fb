/* Memory that sleeps and wakes at the same addresses. Plain C; no CUDA toolkit needed to build or to call.
 *
 * Every function returns TASUKI_OK or another code below, never exits and never throws; tasuki_last_error() then says why, per thread.
 * All functions may be called from any thread. Ids are never reused within a process.
 */
#ifndef TASUKI_MEMORY_H
#define TASUKI_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define TASUKI_ABI_VERSION 6

enum tasuki_code {
  TASUKI_OK = 0,
  TASUKI_OUT_OF_MEMORY = 1, /* tasuki_last_room() has the numbers */
  TASUKI_BAD_ARGUMENT = 2,
  TASUKI_NOT_FOUND = 3,   /* no such arena, export, import, ticket; or an address that is not ours */
  TASUKI_PAUSED = 4,      /* needs memory that sleeps */
  TASUKI_BUSY = 5,        /* blocks are still in use */
  TASUKI_BAD_HANDLE = 6,  /* a peer's chunks that must not be mapped */
  TASUKI_FD_LIMIT = 7,    /* no file descriptor left */
  TASUKI_DRIVER = 8,      /* the driver or kernel refused */
  TASUKI_UNAVAILABLE = 9, /* no such driver on this machine */
  TASUKI_POISONED = 10    /* an undo failed: the arena's pages are in an unknown state */
};

enum tasuki_driver { TASUKI_HOST = 0, TASUKI_CUDA = 1 };
enum tasuki_access { TASUKI_READ_ONLY = 0, TASUKI_READ_WRITE = 1 };
enum tasuki_state { TASUKI_RESIDENT = 0, TASUKI_PAUSING = 1, TASUKI_ASLEEP = 2, TASUKI_RESUMING = 3 };

/* What a pause of an arena keeps. */
enum {
  TASUKI_KEEP_CONTENT = 1, /* in pinned host memory, copied back by the resume */
  TASUKI_KEEP_CHUNKS = 2   /* unmap only; the physical memory stays ours, and a resume is a map */
};

typedef struct {
  uint64_t capacity_bytes;  /* 0: twice the device's memory */
  uint64_t min_chunk_bytes; /* 0: 64 MiB */
  uint64_t max_chunk_bytes; /* 0: 1 GiB */
} tasuki_arena_options;

typedef struct {
  uint64_t used_bytes;      /* in blocks */
  uint64_t total_bytes;     /* of the chunks that hold blocks: what a resume maps */
  uint64_t mapped_bytes;
  uint64_t kept_bytes;      /* physical memory without an address */
  uint64_t host_copy_bytes; /* pinned, kept for the next pause */
  uint64_t exported_bytes;  /* in open exports */
  uint64_t held_bytes;      /* given up by us, kept alive by peers */
  uint64_t num_chunks;
  uint64_t num_blocks;
  uint64_t state; /* enum tasuki_state */
} tasuki_usage;

typedef struct {
  uint64_t num_arenas;
  uint64_t mapped_bytes;
  uint64_t kept_bytes;
  uint64_t host_copy_bytes;
  uint64_t imported_bytes;
  uint64_t num_imports;
  uint64_t num_exports;
  uint64_t num_transfers;
  uint64_t num_refused_frees; /* torch freed an address that is not ours */
} tasuki_totals;

typedef struct {
  uint64_t offset; /* from the arena's base */
  uint64_t bytes;
  int32_t fd; /* owned by the receiver of the struct */
  int32_t reserved;
} tasuki_chunk;

/* Chunks of a pool. */
typedef struct {
  uint64_t chunk_bytes;
  uint64_t num_chunks;
  uint64_t num_free;
  uint64_t num_lent;      /* taken, and mapped by nobody */
  uint64_t num_mapped;    /* for writing, each by its owner */
  uint64_t num_published; /* of those two, what others may read */
  uint64_t num_read;      /* with readers, whoever owns them */
  uint64_t num_ours;      /* taken by this process */
} tasuki_pool_usage;

typedef struct {
  uint64_t address;
  uint64_t bytes;
} tasuki_span;

/* Elements in rows and columns that lie in `held`, in `source` and at indices of a whole tensor; strides in elements. */
typedef struct {
  const void* source; /* copied to `held` first; NULL: summed where they are */
  void* held;
  uint64_t rows, columns;
  int64_t source_row, source_column;
  int64_t held_row, held_column;
  int64_t index_row, index_column;
  uint64_t index; /* of the first element */
  uint32_t slot;  /* of the sum that they add to */
  uint32_t item_bytes;
} tasuki_block;

int tasuki_abi_version(void);
const char* tasuki_last_error(void);
void tasuki_last_room(uint64_t* needed_bytes, uint64_t* free_bytes);

/* Opening twice is no error. `path` names libcuda, NULL for the default. The host driver needs no opening. */
int tasuki_open_cuda(const char* path);
/* At most this many bytes of host chunks; 0 lifts the limit. */
int tasuki_set_host_budget(uint64_t bytes);

/* One pool of chunks for a device, made once and lent to processes in turn. Making fills 1 + num_chunks descriptors, the table's first,
 * which belong to the caller and keep the memory. Opening leaves them the caller's; from then on the device's arenas take their chunks
 * from the pool and give them back, and no chunk is mapped for writing by two. pid, start: this process as the one sees it that
 * reclaims. One pool a device, before its first arena; closed when no arena or import uses it. */
int tasuki_make_pool(int driver, int device, uint64_t num_chunks, uint64_t chunk_bytes, int* fds);
int tasuki_open_pool(int driver, int device, const int* fds, size_t num_fds, uint32_t pid, uint64_t start);
int tasuki_close_pool(int driver, int device);
/* All zeros where this process has opened none. */
int tasuki_get_pool(int driver, int device, tasuki_pool_usage* usage);
/* By the table's descriptor, for whoever keeps the pool and uses none of it. num_ours is 0. */
int tasuki_read_pool(int table_fd, tasuki_pool_usage* usage);
/* Frees what processes hold whose death is certain, by the kernel's word. */
int tasuki_reclaim_pool(int table_fd, uint64_t* num_freed);
int tasuki_identify_process(uint32_t pid, uint64_t* start);

int tasuki_create_arena(int driver, const char* tag, int device, const tasuki_arena_options* options, uint64_t* arena);
int tasuki_destroy_arena(uint64_t arena);
int tasuki_allocate(uint64_t arena, uint64_t bytes, void** address);
int tasuki_free(void* address);
/* The bytes at `address` do not change from now on until their block is freed: pauses that keep content copy them once. *is_ours is 0, and
 * nothing happens, for an address in no arena. */
int tasuki_freeze(void* address, uint64_t bytes, int* is_ours);

/* Nobody uses the bytes of these spans until the next call: of the arena's chunks, those that hold nothing else are given back and do not
 * come with a resume, and those that are needed again come. All or nothing; while the arena sleeps no page moves. Not for an arena whose
 * pauses keep something. */
int tasuki_set_idle(uint64_t arena, const tasuki_span* spans, size_t num_spans, uint64_t* mapped_bytes, uint64_t* given_back_bytes);

/* Pins at most max_bytes of the host memory that a pause of the arena copies to, now or when it holds total_bytes, and says how much it still
 * lacks: so that no pause has to. Nothing where a pause keeps no content. Other calls go on meanwhile. */
int tasuki_reserve_host(uint64_t arena, uint64_t total_bytes, uint64_t max_bytes, uint64_t* missing_bytes);

/* From the next pause on; 0, the default, drops everything. */
int tasuki_set_policy(uint64_t arena, uint32_t flags);

/* All arenas or none; one that sleeps (or is awake) already counts zero bytes. */
int tasuki_pause(const uint64_t* arenas, size_t num_arenas, uint64_t* given_back_bytes);
int tasuki_resume(const uint64_t* arenas, size_t num_arenas, uint64_t* mapped_bytes);

/* Copies run behind the work that `stream` (a CUstream) has so far; the pages of a pause go in tasuki_wait. A resume has mapped on
 * return, its content is there after tasuki_wait, or for the work that `stream` gets after tasuki_stream_after. Each ticket is waited
 * for once. */
int tasuki_pause_async(const uint64_t* arenas, size_t num_arenas, void* stream, uint64_t* ticket);
int tasuki_resume_async(const uint64_t* arenas, size_t num_arenas, uint64_t* ticket);
int tasuki_wait(uint64_t ticket, uint64_t* bytes);
int tasuki_poll(uint64_t ticket, int* is_reached);
/* bytes: 0 for all of a resume, else for what lies at `address`, and at lower addresses of its arena. */
int tasuki_stream_after(uint64_t ticket, void* stream, const void* address, size_t bytes);

int tasuki_get_usage(uint64_t arena, tasuki_usage* usage);
int tasuki_get_totals(tasuki_totals* totals);

/* Fills up to `capacity` chunks with fresh descriptors, or says in *num_chunks how many there are (TASUKI_BAD_ARGUMENT, nothing opened).
 * The export stays open, and is accounted, until the peer is gone and tasuki_close_export is called. */
int tasuki_export(uint64_t arena, int access, tasuki_chunk* chunks, size_t capacity, size_t* num_chunks, void** base, uint64_t* export_id);
int tasuki_close_export(uint64_t export_id);
/* The descriptors stay the caller's and may be closed afterwards. Chunk offsets are kept relative to *base. */
int tasuki_import(int driver, int device, int access, const tasuki_chunk* chunks, size_t num_chunks, uint64_t* import_id, void** base);
int tasuki_unmap_import(uint64_t import_id);
int tasuki_map_import(uint64_t import_id);
/* Drop lets go of the peer's memory and keeps the addresses; renew maps other chunks there, none beyond where the first ones ended. */
int tasuki_drop_import(uint64_t import_id);
int tasuki_renew_import(uint64_t import_id, const tasuki_chunk* chunks, size_t num_chunks);
int tasuki_close_import(uint64_t import_id);

/* Host memory: copies every block, and adds the checksum of what `held` then has (transport/checksum.py) to sums[slot]. */
int tasuki_copy_and_sum(const tasuki_block* blocks, size_t num_blocks, uint64_t* sums, size_t num_sums, uint32_t num_threads);

/* torch.cuda.memory.CUDAPluggableAllocator(path, "tasuki_torch_alloc_<slot>", "tasuki_torch_free"): each slot is for one tag. */
#define TASUKI_NUM_SLOTS 8
#define TASUKI_NUM_DEVICES 16
int tasuki_bind_slot(int slot, int device, uint64_t arena);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
