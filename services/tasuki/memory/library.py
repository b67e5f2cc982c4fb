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

ABI_VERSION = 13
LIBRARY_PATH = Path(__file__).with_name("libtasuki_memory.so")
NUM_SLOTS = 8


class _Chunk(ctypes.Structure):
    _fields_ = [
        ("offset", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("fd", ctypes.c_int32),
    ]


_U64, _I32, _POINTER = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "tasuki_set_host_budget": [_U64],
    "tasuki_create_arena": [_I32, ctypes.c_char_p, _I32, _POINTER, _POINTER],
    "tasuki_destroy_arena": [_U64],
    "tasuki_allocate": [_U64, _U64, _POINTER],
    "tasuki_free": [_POINTER],
    "tasuki_freeze": [_POINTER, _U64, _POINTER],
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


def chunk_table(rows: Sequence[tuple[int, int, int]]) -> Any:
    """Chunks by offset, bytes and descriptor, to be given or to be filled."""
    return (_Chunk * max(1, len(rows)))(*rows)


def chunk_rows(table: Iterable[Any]) -> list[tuple[int, int, int]]:
    return [(chunk.offset, chunk.bytes, chunk.fd) for chunk in table]


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
