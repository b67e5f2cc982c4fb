/* Pausable memory with fixed addresses. Plain C; needs no CUDA toolkit to build or to call.
 *
 * Every function returns TASUKI_OK or an error code below; none exits or throws. tasuki_last_error() has the message, per thread.
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

#define TASUKI_ABI_VERSION 14

enum tasuki_code {
  TASUKI_OK = 0,
  TASUKI_OUT_OF_MEMORY = 1, /* tasuki_last_room() has the numbers */
  TASUKI_BAD_ARGUMENT = 2,
  TASUKI_NOT_FOUND = 3,   /* no such arena, export, import or ticket; or a foreign address */
  TASUKI_PAUSED = 4,      /* needs memory that is paused */
  TASUKI_BUSY = 5,        /* blocks are still in use */
  TASUKI_BAD_HANDLE = 6,  /* a peer's chunks are unsafe to map */
  TASUKI_FD_LIMIT = 7,    /* no file descriptor left */
  TASUKI_DRIVER = 8,      /* the driver or kernel refused */
  TASUKI_UNAVAILABLE = 9, /* no such driver on this machine */
  TASUKI_POISONED = 10    /* an undo failed: the arena's pages are in an unknown state */
};

enum tasuki_driver { TASUKI_HOST = 0, TASUKI_CUDA = 1 };
enum tasuki_access { TASUKI_READ_ONLY = 0, TASUKI_READ_WRITE = 1 };
enum tasuki_state { TASUKI_RESIDENT = 0, TASUKI_ASLEEP = 1, TASUKI_RESUMING = 2 };

/* What a pause of an arena keeps. */
enum {
  TASUKI_KEEP_CONTENT = 1, /* in pinned host memory, copied back by the resume */
  TASUKI_KEEP_CHUNKS = 2   /* unmap only; the physical memory is kept, and a resume maps it */
};

typedef struct {
  uint64_t capacity_bytes;  /* 0: twice the device's memory */
  uint64_t min_chunk_bytes; /* 0: 64 MiB */
  uint64_t max_chunk_bytes; /* 0: 1 GiB */
} tasuki_arena_options;

typedef struct {
  uint64_t used_bytes;      /* in blocks */
  uint64_t total_bytes;     /* of the chunks that hold blocks, which a resume maps */
  uint64_t mapped_bytes;
  uint64_t kept_bytes;      /* physical memory that is not mapped */
  uint64_t host_copy_bytes; /* pinned, kept for the next pause */
  uint64_t exported_bytes;  /* in open exports */
  uint64_t held_bytes;      /* released by us, kept alive by peers */
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
} tasuki_chunk;


/* Rows and columns of elements in `held`, in `source`, and at indices of a whole tensor; strides in elements. */
typedef struct {
  const void* source; /* copied to `held` first; NULL: only summed */
  void* held;
  uint64_t rows, columns;
  int64_t source_row, source_column;
  int64_t held_row, held_column;
  int64_t index_row, index_column;
  uint64_t index; /* of the first element */
  uint32_t slot;  /* of the sum to add to */
  uint32_t item_bytes;
} tasuki_block;

int tasuki_abi_version(void);
const char* tasuki_last_error(void);
void tasuki_last_room(uint64_t* needed_bytes, uint64_t* free_bytes);

/* Idempotent. `path` names libcuda, NULL for the default. The host driver need not be opened. */
int tasuki_open_cuda(const char* path);
/* Limits the bytes of host chunks; 0 lifts the limit. */
int tasuki_set_host_budget(uint64_t bytes);

int tasuki_create_arena(int driver, const char* tag, int device, const tasuki_arena_options* options, uint64_t* arena);
int tasuki_destroy_arena(uint64_t arena);
int tasuki_allocate(uint64_t arena, uint64_t bytes, void** address);
int tasuki_free(void* address);
/* Promises that the bytes at `address` stay constant until their block is freed: pauses that keep content copy them once. For an address
 * in no arena, sets *is_ours to 0 and does nothing. */
int tasuki_freeze(void* address, uint64_t bytes, int* is_ours);
/* Copies an arena's frozen bytes to the host, unless they are there. From then on they may be written: pauses do not read them again, and
 * tasuki_restore_frozen, as a resume, brings back what was saved. Both do nothing while the arena is paused. */
int tasuki_save_frozen(uint64_t arena);
int tasuki_restore_frozen(uint64_t arena);

/* Pins at most max_bytes of the host memory that a pause of the arena needs, now or once it holds total_bytes, and returns how much is
 * still lacking, so that no pause has to pin. Does nothing if a pause keeps no content. Does not block other calls. */
int tasuki_reserve_host(uint64_t arena, uint64_t total_bytes, uint64_t max_bytes, uint64_t* missing_bytes);

/* From the next pause on; 0, the default, discards everything. */
int tasuki_set_policy(uint64_t arena, uint32_t flags);

/* All arenas or none; arenas already paused (or resident) count zero bytes. */
int tasuki_pause(const uint64_t* arenas, size_t num_arenas, uint64_t* given_back_bytes);
int tasuki_resume(const uint64_t* arenas, size_t num_arenas, uint64_t* mapped_bytes);

/* Has mapped on return; the content is ready after tasuki_wait, or for work queued on a CUstream after tasuki_stream_after. Each ticket must
 * be waited for once. */
int tasuki_resume_async(const uint64_t* arenas, size_t num_arenas, uint64_t* ticket);
int tasuki_wait(uint64_t ticket, uint64_t* bytes);
/* bytes: 0 waits for the whole resume, else for the range at `address` and all lower addresses of its arena. */
int tasuki_stream_after(uint64_t ticket, void* stream, const void* address, size_t bytes);

int tasuki_get_usage(uint64_t arena, tasuki_usage* usage);
int tasuki_get_totals(tasuki_totals* totals);

/* Fills up to `capacity` chunks with new descriptors; if there are more, returns TASUKI_BAD_ARGUMENT with the number in *num_chunks and
 * opens none. The export stays open and counted until tasuki_close_export, to be called once the peer is gone. */
int tasuki_export(uint64_t arena, int access, tasuki_chunk* chunks, size_t capacity, size_t* num_chunks, void** base, uint64_t* export_id);
int tasuki_close_export(uint64_t export_id);
/* The caller owns the descriptors and may close them afterwards. Chunk offsets stay relative to *base. */
int tasuki_import(int driver, int device, int access, const tasuki_chunk* chunks, size_t num_chunks, uint64_t* import_id, void** base);
/* Release unmaps the peer's memory and keeps the addresses. Renew maps other chunks there, none beyond the end of the first ones. Close
 * releases everything. */
int tasuki_release_import(uint64_t import_id);
int tasuki_renew_import(uint64_t import_id, const tasuki_chunk* chunks, size_t num_chunks);
int tasuki_close_import(uint64_t import_id);

/* In host memory: copies every block, then adds the checksum of `held` (weights/checksum.py) to sums[slot]. */
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
