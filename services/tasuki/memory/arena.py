"""Arenas over csrc: memory at fixed addresses by tag, paused and resumed, and an allocator with one arena for each tag.

The only door to the native library; csrc/tasuki_memory.h documents each of its calls.
"""

import ctypes  # noqa: TID251  the one door
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasuki.v1.types_pb2 import TagUsage
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
from tasuki.wire.stages import MemoryTag

if TYPE_CHECKING:
    from tasuki.memory.region import CudaRegions

ABI_VERSION = 14
LIBRARY_PATH = Path(__file__).with_name("libtasuki_memory.so")
NUM_SLOTS = 8


_U64, _I32, _POINTER = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "tasuki_set_host_budget": [_U64],
    "tasuki_create_arena": [_I32, ctypes.c_char_p, _I32, _POINTER, _POINTER],
    "tasuki_destroy_arena": [_U64],
    "tasuki_allocate": [_U64, _U64, _POINTER],
    "tasuki_free": [_POINTER],
    "tasuki_freeze": [_POINTER, _U64, _POINTER],
    "tasuki_save_frozen": [_U64],
    "tasuki_restore_frozen": [_U64],
    "tasuki_reserve_host": [_U64, _U64, _U64, _POINTER],
    "tasuki_set_policy": [_U64, ctypes.c_uint32],
    "tasuki_pause": [_POINTER, ctypes.c_size_t, _POINTER],
    "tasuki_resume": [_POINTER, ctypes.c_size_t, _POINTER],
    "tasuki_resume_async": [_POINTER, ctypes.c_size_t, _POINTER],
    "tasuki_wait": [_U64, _POINTER],
    "tasuki_stream_after": [_U64, _POINTER, _POINTER, ctypes.c_size_t],
    "tasuki_get_usage": [_U64, _POINTER],
    "tasuki_get_totals": [_POINTER],
    "tasuki_export": [_U64, _I32, _POINTER, ctypes.c_size_t, _POINTER, _POINTER, _POINTER],
    "tasuki_close_export": [_U64],
    "tasuki_import": [_I32, _I32, _I32, _POINTER, ctypes.c_size_t, _POINTER, _POINTER],
    "tasuki_release_import": [_U64],
    "tasuki_renew_import": [_U64, _POINTER, ctypes.c_size_t],
    "tasuki_close_import": [_U64],
    "tasuki_bind_slot": [_I32, _I32, _U64],
    "tasuki_copy_and_sum": [_POINTER, ctypes.c_size_t, _POINTER, ctypes.c_size_t, ctypes.c_uint32],
}
"""Arguments of the library's functions; each returns a code."""


@functools.cache
def _library() -> ctypes.CDLL:
    if not LIBRARY_PATH.exists():
        raise InternalError(f"{LIBRARY_PATH} is not built: run `make native`")
    library = ctypes.CDLL(str(LIBRARY_PATH))
    if library.tasuki_abi_version() != ABI_VERSION:
        raise InternalError(f"{LIBRARY_PATH} is of another version: run `make native`")
    library.tasuki_last_error.restype = ctypes.c_char_p
    for name, argtypes in _SIGNATURES.items():
        getattr(library, name).argtypes = argtypes
    return library


def call(name: str, *arguments: Any, num_outs: int = 0, device: str = "", tags: Sequence[str] = ()) -> list[int]:
    """Calls tasuki_<name>. Returns the numbers and addresses that it writes through its last `num_outs` arguments.

    device, tags: what an error is about. Raises the error of the library's code, with the library's message.
    """
    # Wide enough for any of them; the machine is little-endian, so a narrower one fills the low bytes.
    outs = [ctypes.c_uint64() for _ in range(num_outs)]
    code = getattr(_library(), f"tasuki_{name}")(*arguments, *(ctypes.byref(out) for out in outs))
    if code != 0:
        raise _error(code, device=device, tags=tags)
    return [out.value for out in outs]


def driver_and_index(device: str) -> tuple[int, int]:
    """The library's number of the driver, and the device's. Raises InvalidArgument for another device, or without CUDA."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise InvalidArgument("device", f"{device!r} is neither cpu nor cuda:<number>")
    if kind == "cuda":
        call("open_cuda", None, device=device)
    return int(kind == "cuda"), int(index or 0)


def numbers(values: Sequence[int]) -> Any:
    """uint64s in a row: also the library's structs of such numbers, to be given or to be filled."""
    return (ctypes.c_uint64 * len(values))(*values)


def buffer_at(address: int, num_bytes: int) -> Any:
    """Host memory as a buffer that does not own it; of an arena's block not after `free` or while the arena sleeps."""
    return (ctypes.c_char * num_bytes).from_address(address)


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


class Keep(IntFlag):
    """Parts that a pause keeps."""

    NOTHING = 0
    CONTENT = 1  # copied to pinned host memory and back
    CHUNKS = 2  # the physical memory stays ours; only its addresses go, and a resume is a map


class ArenaState(IntEnum):
    RESIDENT = 0
    PAUSED = 1
    RESUMING = 2


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
    """Totals over this process."""

    num_arenas: int
    mapped_bytes: int
    kept_bytes: int
    host_copy_bytes: int
    imported_bytes: int
    num_imports: int
    num_exports: int
    num_transfers: int
    num_refused_frees: int  # torch freed an address that is not ours


def set_host_budget(num_bytes: int) -> None:
    """Limits the bytes in host arenas of this process, so that a CPU runs out of memory as cleanly as a GPU; 0 is no limit."""
    call("set_host_budget", num_bytes, device="cpu")


def freeze(address: int, num_bytes: int) -> bool:
    """Declares these bytes constant until their block is freed, so pauses that keep content copy them once.

    Returns False, without effect, for an address in no arena.
    """
    (is_ours,) = call("freeze", address, num_bytes, num_outs=1)
    return bool(is_ours)


def totals() -> Totals:
    counted = numbers([0] * len(fields(Totals)))
    call("get_totals", counted)
    return Totals(*counted)


def _free(address: int, buffers: dict[int, int]) -> None:
    del buffers[address]
    call("free", address)


class Arena:
    """One tag on one device: fixed addresses whose memory is mapped and released."""

    def __init__(
        self, tag: str, *, device: str, capacity_bytes: int = 0, min_chunk_bytes: int = 0, max_chunk_bytes: int = 0
    ) -> None:
        """Reserves `capacity_bytes` of addresses (0: twice the device's memory). Memory comes in chunks between min and max bytes."""
        self.tag, self.device = tag, device
        self._call = partial(call, device=device, tags=(tag,))
        driver, index = driver_and_index(device)
        options = numbers([capacity_bytes, min_chunk_bytes, max_chunk_bytes])
        (self.id,) = self._call("create_arena", driver, tag.encode(), index, options, num_outs=1)
        self.buffers: dict[int, int] = {}
        """Address and bytes of every buffer that is in use."""

    def allocate(self, num_bytes: int) -> int:
        """Address of `num_bytes`, aligned to 512. Raises OutOfGpuMemory; WrongPhase while the arena sleeps."""
        (address,) = self._call("allocate", self.id, num_bytes, num_outs=1)
        return address

    def free(self, address: int) -> None:
        self._call("free", address)

    def buffer(self, num_bytes: int) -> Any:
        """Host memory as a buffer; its bytes go back to the arena when the last reference to it has gone."""
        address = self.allocate(num_bytes)
        block = buffer_at(address, num_bytes)
        self.buffers[address] = num_bytes
        # Not at exit: tensors may be used until the end, and the process's end frees everything.
        weakref.finalize(block, _free, address, self.buffers).atexit = False
        return block

    def set_policy(self, keep: Keep) -> None:
        """Sets what the next pauses keep."""
        self._call("set_policy", self.id, int(keep))

    def save_frozen(self) -> None:
        """Copies frozen bytes to the host, once; they may then be written until `restore_frozen`, or a pause. Raises OutOfGpuMemory."""
        self._call("save_frozen", self.id)

    def restore_frozen(self) -> None:
        """Undoes what was written to frozen bytes since `save_frozen`. Does nothing while paused."""
        self._call("restore_frozen", self.id)

    def reserve_host(self, max_bytes: int, *, total_bytes: int = 0) -> int:
        """Pins at most `max_bytes` of the host memory that a pause copies to. Returns what is still to be pinned; 0 where nothing is kept.

        total_bytes: what the arena will hold, where that is more than it holds now. Other calls go on meanwhile.
        Raises OutOfGpuMemory when the host has no more to pin.
        """
        (missing,) = self._call("reserve_host", self.id, total_bytes, max_bytes, num_outs=1)
        return missing

    def usage(self) -> ArenaUsage:
        counted = numbers([0] * len(fields(ArenaUsage)))
        self._call("get_usage", self.id, counted)
        *counts, state = counted
        return ArenaUsage(*counts, state=ArenaState(state))

    def bind_slot(self, slot: int) -> None:
        """Makes torch's allocation function number `slot` allocate here."""
        self._call("bind_slot", slot, driver_and_index(self.device)[1], self.id)

    def close(self) -> None:
        """Releases addresses and memory. Raises Busy while blocks are in use."""
        self._call("destroy_arena", self.id)


class NativeAllocator:
    """Memory of this process on one device, by tag, over csrc. Pause and resume are idempotent and all-or-nothing.

    Addresses never change, so exports and CUDA graphs stay valid.
    """

    def __init__(self, *, tags: Sequence[MemoryTag], device: str, keep: Mapping[MemoryTag, Keep] | None = None) -> None:
        """`keep`: parts that a pause of each tag keeps; none by default."""
        self.device = device
        # On a GPU the library's chunks, 64 MiB to 1 GiB as measured. On a CPU a mapping costs the same at any size, and models are small.
        chunks = {"min_chunk_bytes": 2 * 2**20, "max_chunk_bytes": 64 * 2**20} if device == "cpu" else {}
        self._arenas = {tag: Arena(tag, device=device, **chunks) for tag in tags}
        self._own = list(self._arenas.values())
        for tag, policy in (keep or {}).items():
            self.arena(tag).set_policy(policy)
        self._cuda = None
        if device != "cpu":
            from tasuki.memory.region import CudaRegions

            self._cuda = CudaRegions(self._own, device=device)

    @property
    def tags(self) -> tuple[MemoryTag, ...]:
        return tuple(self._arenas)

    def arena(self, tag: MemoryTag) -> Arena:
        if tag not in self._arenas:
            raise InvalidArgument("tags", f"{tag} is no tag of this process; it has {', '.join(self.tags)}")
        return self._arenas[tag]

    def adopt(self, tag: MemoryTag, arena: Arena) -> None:
        """Pauses, resumes and counts this arena as `tag`. The caller still fills and closes it."""
        assert tag not in self._arenas
        self._arenas[tag] = arena

    @contextmanager
    def region(self, tag: MemoryTag) -> Iterator[None]:
        """Allocates tensors that this thread makes in the block in `tag`. Raises WrongPhase while the tag sleeps."""
        arena = self.arena(tag)
        if arena.usage().state is ArenaState.PAUSED:
            raise WrongPhase(f"{tag} is asleep: resume it before making tensors in it", needed=f"resume {tag}")
        if self._cuda is not None:
            region = self._cuda.region(tag)
        else:
            from tasuki.memory.region import Placing  # torch, which an arena does not need

            region = Placing(arena)
        with region:
            yield

    def pause(self, tags: Sequence[MemoryTag]) -> int:
        """Returns the bytes given back to the system; 0 for tags already asleep."""
        return _move("pause", [self.arena(tag) for tag in tags])

    def resume(self, tags: Sequence[MemoryTag]) -> int:
        """Returns the bytes mapped. Raises OutOfGpuMemory with every tag still asleep."""
        return self._resume("resume", [self.arena(tag) for tag in tags])

    def resume_async(self, tags: Sequence[MemoryTag]) -> "Transfer":
        """Maps at once; kept content is back after the transfer's `wait`, or on a stream after its `wait_on_stream`."""
        arenas = [self.arena(tag) for tag in tags]
        return Transfer(self._resume("resume_async", arenas), arenas)

    def blocks(self, tag: MemoryTag) -> list[tuple[int, int]]:
        """Address and bytes of each block in the tag's region: the content that a pause discards or keeps."""
        return list(self.arena(tag).buffers.items()) if self._cuda is None else self._cuda.blocks(tag)

    def usage(self) -> list[TagUsage]:
        found: list[TagUsage] = []
        for tag, arena in self._arenas.items():
            usage = arena.usage()
            sizes = {name: getattr(usage, name) for name in ("mapped_bytes", "total_bytes", "kept_bytes", "host_copy_bytes")}
            is_paused = usage.state is ArenaState.PAUSED
            found.append(TagUsage(tag=tag.number, device=self.device, is_paused=is_paused, **sizes))
        return found

    def close(self) -> None:
        """Releases all addresses. Raises Busy while a tensor in a region lives."""
        if self._cuda is not None:
            self._cuda.close()
        for arena in self._own:
            arena.close()

    def _resume(self, name: str, arenas: Sequence[Arena]) -> int:
        """Resumes, and empties torch's cache if memory is short: the driver does not count cached blocks as free, and emptying is slow."""
        try:
            return _move(name, arenas)
        except OutOfGpuMemory:
            if self._cuda is None:
                raise
            self._cuda.empty_cache()
            return _move(name, arenas)

    def cuda_regions(self) -> "CudaRegions":
        if self._cuda is None:
            raise InvalidArgument("device", f"{self.device} has no CUDA memory pools")
        return self._cuda


class Transfer:
    """A resume whose copies are in progress. `wait` is called once."""

    def __init__(self, ticket: int, arenas: Sequence[Arena]) -> None:
        self._ticket = ticket
        self._call = partial(call, **_about(arenas))

    def wait(self) -> int:
        """Ends the transfer. Returns the bytes mapped; a failure leaves every arena as it was."""
        (num_bytes,) = self._call("wait", self._ticket, num_outs=1)
        return num_bytes

    def wait_on_stream(self, stream: int, *, address: int = 0, num_bytes: int = 0) -> None:
        """Makes later work on the CUDA stream wait until the content is back.

        With `num_bytes`, only until those at `address` are back: content returns by rising addresses.
        """
        self._call("stream_after", self._ticket, stream, address, num_bytes)


def _move(name: str, arenas: Sequence[Arena]) -> int:
    """Calls tasuki_<name> for all of these arenas. Returns its number."""
    (number,) = call(name, numbers([arena.id for arena in arenas]), len(arenas), num_outs=1, **_about(arenas))
    return number


def _about(arenas: Sequence[Arena]) -> dict[str, Any]:
    return {"device": arenas[0].device if arenas else "", "tags": [arena.tag for arena in arenas]}
