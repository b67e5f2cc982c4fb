"""The layout of an arena, and which received manifests are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasuki.transport.manifest import (
    ALIGNMENT,
    Entry,
    IpcMemory,
    Manifest,
    check,
    check_complete,
    from_proto,
    lay_out,
    to_proto,
)
from tasuki.wire.errors import BadHandle


def entry(name: str = "a", *, shape: tuple[int, ...] = (6, 5), row_start: int = 0, num_rows: int = 6, offset: int = 0) -> Entry:
    return Entry(name, "bfloat16", shape, row_start, num_rows, offset)


def manifest() -> Manifest:
    return lay_out([entry("a"), entry("b", shape=(300,), num_rows=300)], rank=0, num_ranks=1)


def with_entry(index: int, **changes: object) -> Manifest:
    good = manifest()
    entries = list(good.entries)
    entries[index] = replace(entries[index], **changes)
    return replace(good, entries=tuple(entries))


def test_entries_are_aligned_and_apart() -> None:
    laid_out = manifest()
    assert [e.offset % ALIGNMENT for e in laid_out.entries] == [0, 0]
    assert laid_out.entries[1].offset >= laid_out.entries[0].offset + 6 * 5 * 2
    assert laid_out.arena_bytes >= laid_out.entries[1].offset + 600


def test_survives_the_wire_and_keeps_its_digest() -> None:
    received = from_proto(to_proto(manifest()))
    assert received == manifest()
    assert received.digest() == manifest().digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "b"},
        {"dtype": "float32"},
        {"global_shape": (6, 4)},
        {"row_start": 1, "num_rows": 5},
        {"num_rows": 5},
        {"offset": 512},
    ],
)
def test_digest_sees_every_field(changes: dict[str, object]) -> None:
    assert with_entry(0, **changes).digest() != manifest().digest()


@pytest.mark.parametrize(
    ("index", "changes", "message"),
    [
        (0, {"name": ""}, "name of 0 characters"),
        (0, {"name": "x" * 600}, "name of 600 characters"),
        (0, {"name": "b"}, "b: named twice"),
        (0, {"dtype": "complex64"}, "a: dtype 'complex64'"),
        (0, {"dtype": "__class__"}, "a: dtype '__class__'"),
        (0, {"global_shape": ()}, "a: shape"),
        (0, {"global_shape": (6, 0)}, "a: shape"),
        (0, {"num_rows": 0}, r"a: rows \[0, 0\)"),
        (0, {"row_start": 1}, r"a: rows \[1, 7\) are not in \[0, 6\)"),
        (0, {"offset": 257}, "a: offset 257"),
        (1, {"offset": 1 << 40}, "b: ends at byte"),
        (1, {"global_shape": (1 << 40,), "num_rows": 1 << 40}, "b: ends at byte"),
    ],
)
def test_bad_entries_are_refused_by_name(index: int, changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadHandle, match=message):
        check(with_entry(index, **changes))


def test_overlapping_entries_are_refused() -> None:
    bad = with_entry(1, offset=manifest().entries[0].offset)
    with pytest.raises(BadHandle, match="a and b overlap"):
        from_proto(to_proto(bad))


ON_GPU = {"device_uuid": "b1946ac9", "chunk_bytes": (1 << 21, 1 << 21)}


def test_the_gpu_and_its_chunks_survive_the_wire_and_count_for_the_digest() -> None:
    on_gpu = replace(manifest(), **ON_GPU)
    assert from_proto(to_proto(on_gpu)) == on_gpu
    others = [replace(on_gpu, device_uuid="c2946ac9"), replace(on_gpu, chunk_bytes=(1 << 22,)), manifest()]
    assert len({one.digest() for one in [on_gpu, *others]}) == 4


@pytest.mark.parametrize(
    "changes",
    [{"chunk_bytes": ()}, {"chunk_bytes": (64,)}, {"chunk_bytes": (1 << 21, 0)}, {"chunk_bytes": (64,), "device_uuid": ""}],
)
def test_chunks_that_cannot_hold_the_arena_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadHandle, match="cannot hold an arena"):
        check(replace(manifest(), **{**ON_GPU, **changes}))
    with pytest.raises(BadHandle, match="1 to 252 chunks"):
        check(replace(manifest(), **{**ON_GPU, "chunk_bytes": (1 << 21,) * 253}))


IPC = IpcMemory(handle=b"\1c" + bytes(64), num_bytes=1 << 20, offset=512, counter=b"/torch_1", counter_offset=3, process_id=7)


def test_an_ipc_handle_survives_the_wire_and_counts_for_the_digest() -> None:
    by_handle = replace(manifest(), device_uuid="b1946ac9", ipc_memory=IPC)
    assert from_proto(to_proto(by_handle)) == by_handle
    other = replace(by_handle, ipc_memory=replace(IPC, handle=IPC.handle[:-1] + b"\1"))
    assert len({by_handle.digest(), other.digest(), manifest().digest()}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ipc_memory": replace(IPC, handle=IPC.handle[:40])}, "IPC handle of 40 bytes is cut"),
        ({"ipc_memory": replace(IPC, counter=b"x" * 600)}, "of a wrong form"),
        ({"ipc_memory": replace(IPC, num_bytes=64)}, "allocation of 64 bytes cannot hold"),
        ({"chunk_bytes": (1 << 21,)}, "either an IPC handle on a GPU or chunks"),
        ({"device_uuid": ""}, "either an IPC handle on a GPU or chunks"),
    ],
)
def test_ipc_memory_that_cannot_hold_the_arena_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadHandle, match=message):
        check(replace(manifest(), **{"device_uuid": "b1946ac9", "ipc_memory": IPC, **changes}))


def test_a_header_anywhere_but_at_the_beginning_is_refused() -> None:
    message = to_proto(manifest())
    message.header_offset = 64
    with pytest.raises(BadHandle, match="header_offset is 64 and must be 0"):
        from_proto(message)


def test_rank_outside_the_number_of_ranks_is_refused() -> None:
    with pytest.raises(BadHandle, match="rank 2 of 2"):
        check(replace(manifest(), rank=2, num_ranks=2))


def ranks(*rows: tuple[int, int], shape: tuple[int, ...] = (7, 2)) -> list[Manifest]:
    return [
        lay_out([entry(shape=shape, row_start=start, num_rows=count)], rank=rank, num_ranks=len(rows))
        for rank, (start, count) in enumerate(rows)
    ]


def test_uneven_rows_of_two_ranks_are_complete() -> None:
    check_complete(ranks((0, 4), (4, 3)))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (((0, 4), (3, 4)), "row 3 is published twice"),
        (((0, 3), (4, 3)), "row 3 is published twice or not at all"),
        (((0, 4), (4, 2)), "rows from 6 to 7 are not published"),
    ],
)
def test_rows_that_overlap_or_are_missing_are_refused(rows: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(BadHandle, match=f"a: {message}"):
        check_complete(ranks(*rows))


def test_a_missing_rank_is_refused() -> None:
    with pytest.raises(BadHandle, match="one manifest for each trainer rank"):
        check_complete(ranks((0, 4), (4, 3))[:1])


def test_ranks_that_disagree_about_a_shape_are_refused() -> None:
    first, second = ranks((0, 4), (4, 3))[0], ranks((0, 4), (4, 4), shape=(8, 2))[1]
    with pytest.raises(BadHandle, match="disagree"):
        check_complete([first, second])
