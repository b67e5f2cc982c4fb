"""A single copy of a frozen model: both services map it, neither can write to it, and it outlives its creator."""

import faulthandler
import mmap
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasuki.trainer.backends.fsdp.shards import view_of
from tasuki.weights.export import Shard
from tasuki.weights.fd_socket import FdServer
from tasuki.weights.manifest import Entry, to_proto
from tasuki.weights.plan import Piece, Slice, held_slice
from tasuki.weights.plan import whole as of_whole
from tasuki.weights.shared_base import SharedBase, WritableBase, await_base, find_base
from tasuki.wire.errors import BadHandle, UnsupportedModel
from tests.base_copies import chunk_at, chunks_of

CPU = torch.device("cpu")
# As an engine fuses them: k begins where q ends, at an offset without the alignment that copy engines prefer.
QKV = torch.arange(9 * 5, dtype=torch.float32).view(9, 5)
PARTS = {"q": slice(0, 5), "k": slice(5, 7), "v": slice(7, 9)}


def whole(name: str, shape: tuple[int, ...], offset: int = 0) -> Entry:
    return Entry(name, "float32", shape, (0,) * len(shape), shape, offset)


def entries() -> list[Entry]:
    return [whole(name, (rows.stop - rows.start, 5), 4 * 5 * rows.start) for name, rows in PARTS.items()]


def make_base() -> SharedBase:
    writable = WritableBase([whole("qkv", (9, 5))], device=CPU)
    writable.tensors()[0].copy_(QKV)
    base = writable.publish(entries(), rank=0, num_ranks=1)
    writable.close()
    return base


def hand_out_until_killed(path: Path, is_there: Any) -> None:
    base = make_base()
    base.hand_out(path)
    is_there.set()
    signal.pause()


def write(path: Path) -> None:
    faulthandler.disable()
    base = find_base(path, device=CPU)
    assert base is not None
    _, tensor = base.tensors()["k"]
    tensor[0, 0] = 1.0


def write_as_its_maker(_: Path) -> None:
    faulthandler.disable()
    make_base().tensors_at([whole("qkv", (9, 5))])[0].zero_()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "base.sock"


@pytest.fixture
def maker(path: Path) -> Iterator[Any]:
    """Another process, which creates a base and serves it."""
    context = multiprocessing.get_context("fork")
    is_there = context.Event()
    process = context.Process(target=hand_out_until_killed, args=(path, is_there), daemon=True)
    process.start()
    assert is_there.wait(60)
    yield process
    process.kill()
    process.join()


def content(base: SharedBase) -> dict[str, list[list[float]]]:
    return {name: tensor.tolist() for name, (_, tensor) in base.tensors().items()}


EXPECTED = {name: QKV[rows].tolist() for name, rows in PARTS.items()}


def test_both_sides_read_one_copy_and_neither_has_it_writable(maker: Any, path: Path) -> None:
    base = find_base(path, device=CPU)
    assert base is not None
    assert content(base) == EXPECTED
    (chunk,) = {chunk_at(tensor.data_ptr()) for _, tensor in base.tensors().values()}
    # A forked process also has this one's mappings.
    maker_chunks, chunks = chunks_of(maker.pid), chunks_of(os.getpid())
    assert chunk in maker_chunks.read & chunks.read
    assert chunk not in maker_chunks.written | chunks.written


def test_it_outlives_its_maker_and_is_found_with_whoever_has_it(maker: Any, path: Path, tmp_path: Path) -> None:
    base = find_base(path, device=CPU)
    assert base is not None
    maker.kill()
    maker.join()
    assert find_base(path, device=CPU) is None, "a dead process hands nothing out"
    assert content(base) == EXPECTED
    base.hand_out(tmp_path / "other.sock")
    again = find_base(tmp_path / "other.sock", device=CPU)
    assert again is not None
    assert content(again) == EXPECTED and again.manifest == base.manifest
    base.close()


@pytest.mark.parametrize("writer", [write, write_as_its_maker])
def test_a_write_ends_the_process_that_makes_it(maker: Any, path: Path, writer: Callable[[Path], None]) -> None:
    process = multiprocessing.get_context("fork").Process(target=writer, args=(path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGSEGV
    base = find_base(path, device=CPU)
    assert base is not None and content(base) == EXPECTED


def test_a_descriptor_that_was_handed_out_maps_for_reading_alone(maker: Any, path: Path) -> None:
    base = find_base(path, device=CPU)
    assert base is not None
    (fd,) = base._fds
    with pytest.raises(PermissionError):
        mmap.mmap(fd, base.num_bytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)


def test_who_waits_for_a_base_that_does_not_come_is_told(path: Path) -> None:
    with pytest.raises(BadHandle, match="the engine has loaded no model within 0.2 s"):
        await_base(path, device=CPU, timeout_s=0.2)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda manifest: b"\xff", "no base"),
        (lambda manifest: to_proto(replace(manifest, chunk_bytes=(1 << 21,) * 2)).SerializeToString(), "1 descriptors"),
        (lambda manifest: to_proto(replace(manifest, device_uuid="GPU-1")).SerializeToString(), "no base for cpu"),
        (lambda manifest: to_proto(replace(manifest, entries=manifest.entries[:1] * 2)).SerializeToString(), "named twice"),
        (
            lambda manifest: to_proto(replace(manifest, entries=(whole("q", (5, 5), 2),))).SerializeToString(),
            "not a multiple of 4",
        ),
    ],
)
def test_what_is_no_base_is_refused(path: Path, change: Callable[[Any], bytes], problem: str) -> None:
    base = make_base()
    num_fds = len(os.listdir("/proc/self/fd"))
    server = FdServer(path, message=change(base.manifest), fds=base._fds)
    with pytest.raises(BadHandle, match=problem):
        find_base(path, device=CPU)
    server.close()
    assert len(os.listdir("/proc/self/fd")) == num_fds


# --- an engine rank's part of a tensor, and a trainer's shard in it

SHAPE = (8, 6)


def piece(*, source: Slice, at: int, parameter: str = "p") -> Piece:
    return Piece("w", source, parameter, of_whole(source.shape, offset=at))


def rows_of(start: int, length: int) -> Slice:
    return of_whole(SHAPE).narrowed(0, start, length)


def columns_of(start: int, length: int) -> Slice:
    return of_whole(SHAPE).narrowed(1, start, length)


@pytest.mark.parametrize(
    ("pieces", "held"),
    [
        ([piece(source=of_whole(SHAPE), at=12)], (12, (0, 0), SHAPE)),
        ([piece(source=rows_of(4, 4), at=0)], (0, (4, 0), (4, 6))),
        ([piece(source=columns_of(3, 3), at=0)], (0, (0, 3), (8, 3))),
        # One after the other, as a loader that splits a fused tensor leaves them.
        ([piece(source=rows_of(0, 5), at=6), piece(source=rows_of(5, 3), at=36)], (6, (0, 0), SHAPE)),
        ([piece(source=rows_of(0, 5), at=6), piece(source=rows_of(5, 3), at=42)], None),
        ([piece(source=rows_of(0, 4), at=0), piece(source=rows_of(5, 3), at=24)], None),
        # Transposed on loading.
        ([piece(source=Slice(0, (6, 8), (1, 6)), at=0)], None),
        ([Piece("w", columns_of(0, 3), "p", columns_of(0, 3))], None),
    ],
)
def test_a_slice_of_a_tensor_is_found_where_it_lies_in_one_piece(pieces: list[Piece], held: object) -> None:
    assert held_slice(pieces, SHAPE) == held


W = torch.arange(48.0).view(SHAPE)


@pytest.mark.parametrize(
    ("offsets", "sizes"), [((4, 0), (4, 6)), ((5, 0), (2, 6)), ((0, 0), (4, 6)), ((6, 0), (3, 6)), ((4, 1), (2, 5))]
)
def test_a_shard_is_a_view_of_the_slice_that_contains_it_or_is_refused(offsets: tuple[int, ...], sizes: tuple[int, ...]):
    entry, held = Entry("w", "float32", SHAPE, (4, 0), (4, 6)), W[4:]
    shard = Shard("w", SHAPE, offsets, torch.empty(sizes, device="meta"))
    if offsets[0] >= 4 and sum(pair[0] for pair in (offsets, sizes)) <= 8 and sizes[1] == 6:
        view = view_of(shard, entry, held)
        assert torch.equal(view, W[offsets[0] : offsets[0] + sizes[0]]) and view.data_ptr() == W[offsets[0]].data_ptr()
        return
    with pytest.raises(UnsupportedModel, match=r"rollout.lora: w cannot be shared: .* holds \[4, 6\] at \[4, 0\]") as refused:
        view_of(shard, entry, held)
    assert f"{list(sizes)} at {list(offsets)}" in refused.value.message
