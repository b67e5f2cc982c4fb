"""A frozen model in one copy: both sides map it, neither can write to it, and it outlives whoever made it."""

from __future__ import annotations

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

from tasuki.memory.arena import totals
from tasuki.transport.fd_socket import FdServer
from tasuki.transport.manifest import Entry, check, to_proto
from tasuki.transport.shared_base import SharedBase, WritableBase, await_base, find_base
from tasuki.wire.errors import BadHandle
from tests.base_copies import chunk_at, chunks_of

CPU = torch.device("cpu")
# As an engine fuses them: k begins where q ends, which is no multiple of what a copy engine likes.
QKV = torch.arange(9 * 5, dtype=torch.float32).view(9, 5)
PARTS = {"q": slice(0, 5), "k": slice(5, 7), "v": slice(7, 9)}


def whole(name: str, shape: tuple[int, ...], offset: int = 0) -> Entry:
    return Entry(name, "float32", shape, (0,) * len(shape), shape, offset)


def entries() -> list[Entry]:
    return [whole(name, (rows.stop - rows.start, 5), 4 * 5 * rows.start) for name, rows in PARTS.items()]


def make_base() -> SharedBase:
    writable = WritableBase([whole("qkv", (9, 5))], device=CPU)
    writable.tensors()[0].copy_(QKV)
    base = writable.publish(entries())
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
    """Another process, which has made a base and hands it out."""
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
    # A fork also has what this process had mapped.
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


def test_nothing_but_the_base_is_left_of_its_making() -> None:
    before = totals()
    base = make_base()
    after = totals()
    assert after.num_arenas == before.num_arenas and after.num_exports == before.num_exports
    assert (after.mapped_bytes, after.imported_bytes - before.imported_bytes) == (before.mapped_bytes, base.num_bytes)


def test_who_waits_for_a_base_that_does_not_come_is_told(path: Path) -> None:
    with pytest.raises(BadHandle, match="trainer.lora.share_base: the engine has loaded no model within 0.2 s"):
        await_base(path, device=CPU, timeout_s=0.2)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda manifest: b"\xff", "no base"),
        (lambda manifest: to_proto(replace(manifest, chunk_bytes=(1 << 21,) * 2)).SerializeToString(), "1 descriptors"),
        (lambda manifest: to_proto(replace(manifest, device_uuid="GPU-1")).SerializeToString(), "no base for cpu"),
        (lambda manifest: to_proto(replace(manifest, entries=manifest.entries[:1] * 2)).SerializeToString(), "named twice"),
        (
            lambda manifest: to_proto(
                replace(manifest, entries=(replace(manifest.entries[0], sizes=(4, 5)),))
            ).SerializeToString(),
            "not published",
        ),
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


def test_published_weights_stay_aligned_for_copies() -> None:
    manifest = make_base().manifest
    with pytest.raises(BadHandle, match="not a multiple of 256"):
        check(manifest)
