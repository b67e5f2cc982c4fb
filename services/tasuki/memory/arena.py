"""The native memory library, typed: the only place that speaks ctypes. See csrc/tasuki_memory.h for what each call promises."""

from __future__ import annotations

import ctypes  # noqa: TID251  the one door
import functools
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Any

from tasuki.wire.errors import (
    BadHandle,
    Busy,
    EnginePoisoned,
    InternalError,
    InvalidArgument,
    OutOfGpuMemory,
    TasukiError,
    WrongPhase,
)

ABI_VERSION = 2
LIBRARY_PATH = Path(__file__).with_name("libtasuki_memory.so")
NUM_SLOTS = 8


class Keep(IntFlag):
    """What a pause keeps."""

    NOTHING = 0
    CONTENT = 1  # copied to pinned host memory and back
    CHUNKS = 2  # the physical memory stays ours; only its addresses go, and a resume is a map


class Access(IntEnum):
    READ_ONLY = 0
    READ_WRITE = 1


class ArenaState(IntEnum):
    RESIDENT = 0
    PAUSING = 1
    PAUSED = 2
    RESUMING = 3


@dataclass(frozen=True, slots=True)
class ArenaUsage:
    """One arena. Bytes, but for the counts and the state."""

    used_bytes: int  # in blocks
    total_bytes: int  # of the chunks that hold blocks: what a resume maps
    mapped_bytes: int
    kept_bytes: int  # physical memory without an address
    host_copy_bytes: int  # pinned
    exported_bytes: int  # in open exports
    held_bytes: int  # given up by us, kept alive by peers
    num_chunks: int
    num_blocks: int
    state: ArenaState


@dataclass(frozen=True, slots=True)
class Totals:
    """Everything of this process."""

    num_arenas: int
    mapped_bytes: int
    kept_bytes: int
    host_copy_bytes: int
    imported_bytes: int
    num_imports: int
    num_exports: int
    num_transfers: int
    num_refused_frees: int  # torch freed an address that is not ours


@dataclass(frozen=True, slots=True)
class SharedChunk:
    """A piece of an arena that another process can map: bytes [offset, offset + num_bytes) from the arena's base are in `fd`."""

    offset: int
    num_bytes: int
    fd: int


class _Options(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("capacity_bytes", "min_chunk_bytes", "max_chunk_bytes")]


class _Usage(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_uint64) for field in fields(ArenaUsage)]


class _Totals(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_uint64) for field in fields(Totals)]


class _Chunk(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("fd", ctypes.c_int32), ("reserved", ctypes.c_int32)]


@functools.cache
def _library() -> ctypes.CDLL:
    if not LIBRARY_PATH.exists():
        raise InternalError(f"{LIBRARY_PATH} is not built: run `make native`")
    library = ctypes.CDLL(str(LIBRARY_PATH))
    if library.tasuki_abi_version() != ABI_VERSION:
        raise InternalError(f"{LIBRARY_PATH} is of another version: run `make native`")
    library.tasuki_last_error.restype = ctypes.c_char_p
    u64, i32, pointer = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
    signatures: dict[str, list[Any]] = {
        "tasuki_set_host_budget": [u64],
        "tasuki_create_arena": [i32, ctypes.c_char_p, i32, pointer, pointer],
        "tasuki_destroy_arena": [u64],
        "tasuki_allocate": [u64, u64, pointer],
        "tasuki_free": [pointer],
        "tasuki_set_policy": [u64, ctypes.c_uint32],
        "tasuki_pause": [pointer, ctypes.c_size_t, pointer],
        "tasuki_resume": [pointer, ctypes.c_size_t, pointer],
        "tasuki_pause_async": [pointer, ctypes.c_size_t, pointer, pointer],
        "tasuki_resume_async": [pointer, ctypes.c_size_t, pointer],
        "tasuki_wait": [u64, pointer],
        "tasuki_poll": [u64, pointer],
        "tasuki_stream_after": [u64, pointer],
        "tasuki_get_usage": [u64, pointer],
        "tasuki_get_totals": [pointer],
        "tasuki_export": [u64, i32, pointer, ctypes.c_size_t, pointer, pointer, pointer],
        "tasuki_close_export": [u64],
        "tasuki_import": [i32, i32, i32, pointer, ctypes.c_size_t, pointer, pointer],
        "tasuki_unmap_import": [u64],
        "tasuki_map_import": [u64],
        "tasuki_drop_import": [u64],
        "tasuki_renew_import": [u64, pointer, ctypes.c_size_t],
        "tasuki_close_import": [u64],
        "tasuki_bind_slot": [i32, i32, u64],
    }
    for name, argtypes in signatures.items():
        getattr(library, name).argtypes = argtypes
    return library


def _error(code: int, *, device: str, tags: Sequence[str]) -> TasukiError:
    message = (_library().tasuki_last_error() or b"").decode()
    names = ",".join(tags)
    match code:
        case 1:
            needed, free = ctypes.c_uint64(), ctypes.c_uint64()
            _library().tasuki_last_room(ctypes.byref(needed), ctypes.byref(free))
            return OutOfGpuMemory(
                f"{device} {message}", tag=names, needed_bytes=needed.value, free_bytes=free.value, device=device
            )
        case 2 | 9:
            return InvalidArgument("device" if code == 9 else "memory", message)
        case 4:
            return WrongPhase(message, needed=f"resume {names}")
        case 5:
            return Busy(message, tag=names)
        case 6:
            return BadHandle(message)
        case 10:
            return EnginePoisoned(message, tag=names)
        case _:
            return InternalError(message, tag=names, device=device)


def _check(code: int, *, device: str, tags: Sequence[str]) -> None:
    if code != 0:
        raise _error(code, device=device, tags=tags)


def _driver_and_index(device: str) -> tuple[int, int]:
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise InvalidArgument("device", f"{device!r} is neither cpu nor cuda:<number>")
    if kind == "cuda":
        _check(_library().tasuki_open_cuda(None), device=device, tags=())
    return int(kind == "cuda"), int(index or 0)


def set_host_budget(num_bytes: int) -> None:
    """At most this many bytes in host arenas of this process, so that a CPU runs out of memory as cleanly as a GPU; 0 lifts the limit."""
    _check(_library().tasuki_set_host_budget(num_bytes), device="cpu", tags=())


def totals() -> Totals:
    counted = _Totals()
    _check(_library().tasuki_get_totals(ctypes.byref(counted)), device="", tags=())
    return Totals(*(getattr(counted, field.name) for field in fields(Totals)))


def _free(address: int, buffers: dict[int, int]) -> None:
    del buffers[address]
    _library().tasuki_free(address)


class Arena:
    """One tag on one device: addresses that stay, memory that comes and goes."""

    def __init__(
        self,
        tag: str,
        *,
        device: str,
        capacity_bytes: int = 0,
        min_chunk_bytes: int = 0,
        max_chunk_bytes: int = 0,
    ) -> None:
        """Reserves `capacity_bytes` of addresses (0: twice the device's memory). Memory comes in chunks between min and max bytes."""
        self.tag, self.device = tag, device
        driver, index = _driver_and_index(device)
        options, arena = _Options(capacity_bytes, min_chunk_bytes, max_chunk_bytes), ctypes.c_uint64()
        code = _library().tasuki_create_arena(driver, tag.encode(), index, ctypes.byref(options), ctypes.byref(arena))
        self._check(code)
        self._id = arena.value
        self._buffers: dict[int, int] = {}

    def _check(self, code: int) -> None:
        _check(code, device=self.device, tags=(self.tag,))

    @property
    def id(self) -> int:
        return self._id

    def allocate(self, num_bytes: int) -> int:
        """Address of `num_bytes`, aligned to 512. Raises OutOfGpuMemory; WrongPhase while the arena sleeps."""
        address = ctypes.c_void_p()
        self._check(_library().tasuki_allocate(self._id, num_bytes, ctypes.byref(address)))
        assert address.value is not None
        return address.value

    def free(self, address: int) -> None:
        self._check(_library().tasuki_free(address))

    def buffer(self, num_bytes: int) -> Any:
        """Host memory as a buffer; its bytes go back to the arena when the last reference to it has gone."""
        address = self.allocate(num_bytes)
        block = (ctypes.c_char * num_bytes).from_address(address)
        self._buffers[address] = num_bytes
        # Not at exit: tensors may be used until the very end, and the process's end frees everything.
        weakref.finalize(block, _free, address, self._buffers).atexit = False
        return block

    def view(self, address: int, num_bytes: int) -> Any:
        """Host memory of a block as a buffer; must not be used after `free` or while the arena sleeps."""
        return (ctypes.c_char * num_bytes).from_address(address)

    def buffers(self) -> list[tuple[int, int]]:
        """Address and bytes of every buffer that is in use."""
        return list(self._buffers.items())

    def set_policy(self, keep: Keep) -> None:
        """What the next pauses keep."""
        self._check(_library().tasuki_set_policy(self._id, int(keep)))

    def usage(self) -> ArenaUsage:
        usage = _Usage()
        self._check(_library().tasuki_get_usage(self._id, ctypes.byref(usage)))
        values = {field.name: getattr(usage, field.name) for field in fields(ArenaUsage)}
        return ArenaUsage(**{**values, "state": ArenaState(values["state"])})

    def export(self, access: Access) -> Export:
        """Fresh descriptors of every chunk that holds memory; stale after the next pause that does not keep chunks."""
        chunks = (_Chunk * max(1, self.usage().num_chunks))()
        num_chunks, base, export = ctypes.c_size_t(), ctypes.c_void_p(), ctypes.c_uint64()
        code = _library().tasuki_export(
            self._id, access, chunks, len(chunks), ctypes.byref(num_chunks), ctypes.byref(base), ctypes.byref(export)
        )
        self._check(code)
        shared = [SharedChunk(offset=one.offset, num_bytes=one.bytes, fd=one.fd) for one in chunks[: num_chunks.value]]
        return Export(export.value, base=base.value or 0, chunks=shared)

    def bind_slot(self, slot: int) -> None:
        """Makes torch's allocation function number `slot` allocate here."""
        self._check(_library().tasuki_bind_slot(slot, _driver_and_index(self.device)[1], self._id))

    def close(self) -> None:
        """Gives addresses and memory back. Raises Busy while blocks are in use."""
        self._check(_library().tasuki_destroy_arena(self._id))


class Export:
    """Chunks handed to a peer. Open, and accounted as possibly held, until the peer is gone and `close` is called."""

    def __init__(self, export_id: int, *, base: int, chunks: list[SharedChunk]) -> None:
        self._id, self.base, self.chunks = export_id, base, chunks

    def close_fds(self) -> None:
        """After they were sent: our copies are not needed any more."""
        for chunk in self.chunks:
            os.close(chunk.fd)
        self.chunks = []

    def close(self) -> None:
        self.close_fds()
        _check(_library().tasuki_close_export(self._id), device="", tags=())


class Import:
    """A peer's chunks at addresses of ours. The peer's memory stays alive until this is closed."""

    def __init__(self, chunks: Sequence[SharedChunk], *, device: str, access: Access) -> None:
        """The descriptors stay the caller's. Raises BadHandle for anything that is not exactly what it says."""
        self.device = device
        driver, index = _driver_and_index(device)
        import_id, base = ctypes.c_uint64(), ctypes.c_void_p()
        code = _library().tasuki_import(
            driver, index, access, _described(chunks), len(chunks), ctypes.byref(import_id), ctypes.byref(base)
        )
        _check(code, device=device, tags=())
        self._id, self.base = import_id.value, base.value or 0

    def view(self, offset: int, num_bytes: int) -> Any:
        """Host memory of the peer as a buffer; must not be used after `close` or while unmapped."""
        return (ctypes.c_char * num_bytes).from_address(self.base + offset)

    def unmap(self) -> None:
        _check(_library().tasuki_unmap_import(self._id), device=self.device, tags=())

    def map(self) -> None:
        _check(_library().tasuki_map_import(self._id), device=self.device, tags=())

    def drop(self) -> None:
        """Lets go of the peer's memory and keeps the addresses. Idempotent."""
        _check(_library().tasuki_drop_import(self._id), device=self.device, tags=())

    def renew(self, chunks: Sequence[SharedChunk]) -> None:
        """After `drop`: other chunks of the peer at the same addresses. Raises BadHandle, and then holds nothing."""
        _check(_library().tasuki_renew_import(self._id, _described(chunks), len(chunks)), device=self.device, tags=())

    def close(self) -> None:
        _check(_library().tasuki_close_import(self._id), device=self.device, tags=())


class Transfer:
    """A pause or resume whose copies are under way. `wait` is called once."""

    def __init__(self, ticket: int, arenas: Sequence[Arena]) -> None:
        self._ticket, self._arenas = ticket, arenas

    @property
    def is_done(self) -> bool:
        """Whether the copies have finished; the pages of a pause go in `wait` all the same."""
        is_reached = ctypes.c_int()
        _check_arenas(_library().tasuki_poll(self._ticket, ctypes.byref(is_reached)), self._arenas)
        return bool(is_reached.value)

    def wait(self) -> int:
        """Ends the transfer. Returns bytes given back (pause) or mapped (resume); a failure has left every arena as it was."""
        num_bytes = ctypes.c_uint64()
        _check_arenas(_library().tasuki_wait(self._ticket, ctypes.byref(num_bytes)), self._arenas)
        return num_bytes.value

    def wait_on_stream(self, stream: int) -> None:
        """Work given to the CUDA stream from now on starts after the content of a resume has come back."""
        _check_arenas(_library().tasuki_stream_after(self._ticket, stream), self._arenas)


def _described(chunks: Sequence[SharedChunk]) -> Any:
    return (_Chunk * max(1, len(chunks)))(*((chunk.offset, chunk.num_bytes, chunk.fd, 0) for chunk in chunks))


def _check_arenas(code: int, arenas: Sequence[Arena]) -> None:
    _check(code, device=arenas[0].device if arenas else "", tags=[arena.tag for arena in arenas])


def _ids(arenas: Sequence[Arena]) -> Any:
    return (ctypes.c_uint64 * max(1, len(arenas)))(*(arena.id for arena in arenas))


def pause(arenas: Sequence[Arena]) -> int:
    """All or none. Returns the bytes given back to the system; nothing for arenas that sleep already."""
    num_bytes = ctypes.c_uint64()
    _check_arenas(_library().tasuki_pause(_ids(arenas), len(arenas), ctypes.byref(num_bytes)), arenas)
    return num_bytes.value


def resume(arenas: Sequence[Arena]) -> int:
    """All or none, at the same addresses. Returns the bytes mapped. Raises OutOfGpuMemory with every arena still asleep."""
    num_bytes = ctypes.c_uint64()
    _check_arenas(_library().tasuki_resume(_ids(arenas), len(arenas), ctypes.byref(num_bytes)), arenas)
    return num_bytes.value


def pause_async(arenas: Sequence[Arena], *, stream: int = 0) -> Transfer:
    """Starts copying content behind the work that the CUDA stream has so far. The memory must not be used from now on."""
    ticket = ctypes.c_uint64()
    code = _library().tasuki_pause_async(_ids(arenas), len(arenas), stream, ctypes.byref(ticket))
    _check_arenas(code, arenas)
    return Transfer(ticket.value, arenas)


def resume_async(arenas: Sequence[Arena]) -> Transfer:
    """Maps at once and starts copying content back; it is there after `wait`, or on a stream after `wait_on_stream`."""
    ticket = ctypes.c_uint64()
    _check_arenas(_library().tasuki_resume_async(_ids(arenas), len(arenas), ctypes.byref(ticket)), arenas)
    return Transfer(ticket.value, arenas)
