"""C interface of the native library, and the only module that uses ctypes. csrc/tasuki_memory.h documents each call."""

from __future__ import annotations

import ctypes  # noqa: TID251  the one door
import functools
from collections.abc import Iterable, Sequence
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

ABI_VERSION = 11
LIBRARY_PATH = Path(__file__).with_name("libtasuki_memory.so")
PRELOADED_PATH = Path(__file__).with_name("libtasuki_cudart.so")
"""For LD_PRELOAD of processes on a pool of a GPU; see `redirect_cudart`."""
NUM_SLOTS = 8


class _Chunk(ctypes.Structure):
    _fields_ = [
        ("offset", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("fd", ctypes.c_int32),
        ("index", ctypes.c_uint32),
        ("pool", ctypes.c_uint64),
    ]


_U64, _I32, _POINTER = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "tasuki_set_host_budget": [_U64],
    "tasuki_get_room": [_I32, _I32, _POINTER, _POINTER],
    "tasuki_make_pool": [_I32, _I32, _U64, _U64, _POINTER],
    "tasuki_open_pool": [_I32, _I32, _POINTER, ctypes.c_size_t, ctypes.c_uint32, _U64],
    "tasuki_close_pool": [_I32, _I32],
    "tasuki_get_pool": [_I32, _I32, _POINTER],
    "tasuki_read_pool": [_I32, _POINTER],
    "tasuki_reclaim_pool": [_I32, _POINTER],
    "tasuki_identify_process": [ctypes.c_uint32, _POINTER],
    "tasuki_create_arena": [_I32, ctypes.c_char_p, _I32, _POINTER, _POINTER],
    "tasuki_destroy_arena": [_U64],
    "tasuki_allocate": [_U64, _U64, _POINTER],
    "tasuki_free": [_POINTER],
    "tasuki_freeze": [_POINTER, _U64, _POINTER],
    "tasuki_reserve_host": [_U64, _U64, _U64, _POINTER],
    "tasuki_set_policy": [_U64, ctypes.c_uint32],
    "tasuki_pause": [_POINTER, ctypes.c_size_t, ctypes.c_int, _POINTER],
    "tasuki_resume": [_POINTER, ctypes.c_size_t, _POINTER],
    "tasuki_pause_async": [_POINTER, ctypes.c_size_t, ctypes.c_int, _POINTER, _POINTER],
    "tasuki_resume_async": [_POINTER, ctypes.c_size_t, _POINTER],
    "tasuki_wait": [_U64, _POINTER],
    "tasuki_poll": [_U64, _POINTER],
    "tasuki_copied_bytes": [_POINTER],
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


def check_preloadable(path: Path = PRELOADED_PATH) -> None:
    """Raises InternalError if the dynamic linker would ignore the library without an error."""
    if not path.exists():
        raise InternalError(f"{path} is missing: run `make native`, or install a wheel of tasuki")
    if any(one == ":" or one.isspace() for one in str(path)):
        raise InternalError(f"{path} cannot be in LD_PRELOAD, where colons and spaces separate paths: install tasuki elsewhere")


TORCH_ALLOCATOR = "libc10_cuda.so"


def redirect_cudart(device_index: int, arena_id: int) -> None:
    """From now on cudaMalloc of torch's allocator allocates in the arena. Raises InternalError unless PRELOADED_PATH was preloaded.

    Other libraries keep the runtime's memory: those of an engine's all-reduce share theirs by handles that only the runtime gives.
    """
    try:
        redirect: Any = ctypes.CDLL(None).tasuki_redirect_cudart
    except AttributeError:
        raise InternalError(f"{PRELOADED_PATH} is not in this process's LD_PRELOAD; start the node with: tasuki up") from None
    redirect.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
    functions = [ctypes.cast(function, ctypes.c_void_p) for function in (_library().tasuki_allocate, _library().tasuki_free)]
    if redirect(device_index, arena_id, TORCH_ALLOCATOR.encode(), *functions) != 0:
        raise InternalError(f"cuda:{device_index} is no device that cudaMalloc can be redirected for")


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


def descriptors(values: Sequence[int]) -> Any:
    """File descriptors in a row, to be given or to be filled."""
    return (ctypes.c_int * len(values))(*values)


def chunk_table(rows: Sequence[tuple[int, int, int, int, int]]) -> Any:
    """Chunks by offset, bytes, descriptor, and index in a pool, to be given or to be filled."""
    return (_Chunk * max(1, len(rows)))(*rows)


def chunk_rows(table: Iterable[Any]) -> list[tuple[int, int, int, int, int]]:
    return [(chunk.offset, chunk.bytes, chunk.fd, chunk.index, chunk.pool) for chunk in table]


def buffer_at(address: int, num_bytes: int) -> Any:
    """Host memory as a buffer that does not own it."""
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
