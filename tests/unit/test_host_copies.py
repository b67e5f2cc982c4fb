"""Host copies of paused memory: made before the first pause, and repeated only for bytes that may have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from tasuki.config.places import pulse_dir
from tasuki.memory import arena as native
from tasuki.memory.allocator import NativeAllocator
from tasuki.memory.arena import Arena, Keep
from tasuki.memory.room_signal import RoomSignal
from tasuki.memory.tags import MemoryTag, Movement, MovementKind, TagUsage
from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.heartbeat import Heartbeat, Pulse, read_pulse
from tasuki.trainer.backends.fsdp.memory import TrainerMemory
from tasuki.trainer.backends.fsdp.returning import Returning
from tasuki.trainer.backends.fsdp.staying import ExportChoice, Staying
from tests.arenas import pause, resume

MIB = 2**20
BOTH = [MemoryTag.WEIGHTS, MemoryTag.OPTIMIZER]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def parameter(memory: TrainerMemory, mesh: DeviceMesh, value: float, *, is_frozen: bool) -> Parameter:
    with memory.region(MemoryTag.WEIGHTS):
        local = torch.full((64, 64), value)
    return Parameter(DTensor.from_local(local, mesh, [Shard(0)]), requires_grad=not is_frozen)


def local_of(one: Parameter) -> torch.Tensor:
    assert isinstance(one.data, DTensor)
    return one.data.to_local()


def test_a_frozen_parameter_is_copied_to_the_host_once_and_comes_back_every_time(mesh: DeviceMesh) -> None:
    memory = TrainerMemory(mesh, ExportChoice(of_parameters=False, stays=True))
    base, adapter = parameter(memory, mesh, 1.0, is_frozen=True), parameter(memory, mesh, 2.0, is_frozen=False)
    memory.freeze([base])
    for turn in range(3):
        local_of(adapter).fill_(float(turn))
        assert memory.pause([MemoryTag.WEIGHTS]).num_bytes > 0
        memory.resume([MemoryTag.WEIGHTS])
        assert bool((local_of(base) == 1.0).all() and (local_of(adapter) == turn).all())
    # If the promise is broken, the old copy comes back.
    local_of(base).fill_(9.0)
    memory.pause([MemoryTag.WEIGHTS])
    memory.resume([MemoryTag.WEIGHTS])
    assert bool((local_of(base) == 1.0).all())


def test_what_stays_leaves_only_to_make_room(mesh: DeviceMesh) -> None:
    staying = Staying(frozenset({MemoryTag.WEIGHTS}))
    memory = TrainerMemory(mesh, ExportChoice(of_parameters=False, stays=True), staying=staying)
    kept = parameter(memory, mesh, 3.0, is_frozen=False)
    with memory.region(MemoryTag.OPTIMIZER):
        moment = torch.full((64, 64), 4.0)

    def mapped() -> dict[str, tuple[bool, bool]]:
        return {usage.tag: (usage.stays, bool(usage.mapped_bytes)) for usage in memory.usage()}

    assert memory.pause(BOTH).num_bytes == 2 * MIB
    assert mapped()["weights"] == (True, True) and mapped()["optimizer"] == (False, False)
    assert bool((local_of(kept) == 3.0).all())
    assert memory.resume(BOTH).num_bytes == 2 * MIB
    assert memory.pause(BOTH, makes_room=True).num_bytes == 4 * MIB
    assert mapped()["weights"] == (True, False)
    assert memory.resume(BOTH).num_bytes == 4 * MIB
    memory.wait_for_content()
    assert bool((local_of(kept) == 3.0).all() and (moment == 4.0).all())


def test_what_is_copied_leaves_at_a_request_where_the_kv_cache_grows(mesh: DeviceMesh, tmp_path: Path) -> None:
    signal = RoomSignal(tmp_path / "room-request")
    memory = TrainerMemory(mesh, ExportChoice(of_parameters=False, stays=True), staying=Staying(room_signal=signal))
    weights = parameter(memory, mesh, 3.0, is_frozen=False)
    with memory.region(MemoryTag.OPTIMIZER):
        moment = torch.full((64, 64), 4.0)
    (gradient,) = memory.make_gradients([weights])

    def usage() -> dict[str, TagUsage]:
        return {usage.tag: usage for usage in memory.usage()}

    for turn in range(3):
        local_of(weights).fill_(float(turn))
        assert memory.pause([*BOTH, MemoryTag.GRADIENTS]).num_bytes == 2 * MIB, "the gradients' alone"
        assert all(one.is_paused and one.leaves_later is (one.tag in BOTH) for one in usage().values())
        if turn:
            assert not signal.is_requested, "cleared"
            signal.request()
        deadline = time.monotonic() + 20
        while any(one.is_leaving for one in usage().values()):
            assert time.monotonic() < deadline
        assert not any(one.mapped_bytes for one in usage().values())
        # A second pause, and a resume in the middle, find it unchanged.
        assert memory.pause(BOTH).num_bytes == 0
        assert memory.resume(BOTH).num_bytes == 4 * MIB
        memory.wait_for_content()
        assert bool((local_of(weights) == turn).all() and (moment == 4.0).all())
        memory.pause(BOTH)
        memory.resume([*BOTH, MemoryTag.GRADIENTS])
        memory.wait_for_content()
        assert bool((local_of(weights) == turn).all() and (moment == 4.0).all())
    assert not gradient.any()
    address = local_of(weights).data_ptr()
    assert memory.pause(BOTH).num_bytes == 0 and all(usage()[tag].is_leaving for tag in BOTH)
    time.sleep(0.1)
    assert all(usage()[tag].mapped_bytes == 2 * MIB for tag in BOTH), "nobody has asked"
    assert memory.resume(BOTH).num_bytes == 0, "nothing had begun to leave"
    assert not any(usage()[tag].is_paused for tag in BOTH)
    assert local_of(weights).data_ptr() == address and bool((local_of(weights) == 2).all())
    assert memory.pause(BOTH, makes_room=True).num_bytes == 4 * MIB, "an engine is to start there: at once"
    memory.close()


def test_host_memory_is_taken_in_steps_before_a_pause_needs_it() -> None:
    arena = Arena("optimizer", device="cpu", min_chunk_bytes=2 * MIB, max_chunk_bytes=64 * MIB)
    address = arena.allocate(40 * MIB)
    assert arena.reserve_host(MIB) == 0, "nothing of it is kept"
    arena.set_policy(Keep.CONTENT)
    steps = [arena.reserve_host(16 * MIB) for _ in range(3)]
    assert steps == [24 * MIB, 8 * MIB, 0]
    pinned = arena.usage().host_copy_bytes
    pause([arena])
    assert arena.usage().host_copy_bytes == pinned >= 40 * MIB
    resume([arena])
    arena.free(address)
    arena.close()


def test_an_address_in_no_arena_is_not_frozen() -> None:
    heap = torch.zeros(16)
    assert not native.freeze(heap.data_ptr(), heap.nbytes)


def growing(mesh: DeviceMesh, folder: Path, **settings: Any) -> tuple[TrainerMemory, list[torch.Tensor]]:
    """Memory beside a growing KV cache, with its tensors."""
    choice = ExportChoice(of_parameters=False, stays=True)
    staying = Staying(room_signal=RoomSignal(folder / "room-request"))
    memory = TrainerMemory(mesh, choice, staying=staying, **settings)
    weights = parameter(memory, mesh, 3.0, is_frozen=False)
    with memory.region(MemoryTag.OPTIMIZER):
        return memory, [weights, torch.full((64, 64), 4.0)]


def pending(memory: TrainerMemory) -> dict[MemoryTag, int]:
    return {usage.tag: usage.pending_bytes for usage in memory.usage() if usage.pending is MovementKind.LEAVE}


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_answer_tells_what_leaves_later_and_the_next_one_what_has_left(mesh: DeviceMesh, tmp_path: Path) -> None:
    memory, _tensors = growing(mesh, tmp_path)
    paused = memory.pause(BOTH)
    assert paused.begun == tuple(Movement(MovementKind.LEAVE, tag, 2 * MIB) for tag in reversed(BOTH)) and not paused.ended
    wait_until(lambda: not pending(memory))
    resumed = memory.resume(BOTH)
    assert [(one.kind, one.tag, one.num_bytes) for one in resumed.ended] == [
        (MovementKind.LEAVE, tag, 2 * MIB) for tag in reversed(BOTH)
    ]
    assert all(one.seconds > 0 and one.end_time <= time.time() for one in resumed.ended)
    assert not resumed.begun, "a CPU's content is back with the answer"
    # The second time it is released on request, and nobody asks.
    assert memory.pause(BOTH).begun == paused.begun
    assert pending(memory) == dict.fromkeys(BOTH, 2 * MIB)
    assert [(one.tag, one.num_bytes, one.seconds) for one in memory.resume(BOTH).ended] == [
        (tag, 0, 0.0) for tag in reversed(BOTH)
    ]
    assert not memory.pause(BOTH, makes_room=True).ended, "an end is told once"
    memory.close()


def test_state_returns_when_room_is_offered_and_leaves_again_without_a_copy(mesh: DeviceMesh, tmp_path: Path) -> None:
    signal = RoomSignal(tmp_path / "room-request")
    memory, tensors = growing(mesh, tmp_path)
    address = local_of(tensors[0]).data_ptr()
    memory.pause(BOTH)
    wait_until(lambda: not pending(memory))
    signal.offer()
    wait_until(lambda: pending(memory) == dict.fromkeys(BOTH, 2 * MIB))
    assert all(usage.is_paused for usage in memory.usage() if usage.tag in BOTH), "it may leave again"
    copied = native.copied_bytes()
    signal.request()
    wait_until(lambda: not pending(memory))
    assert not any(usage.mapped_bytes for usage in memory.usage())
    assert native.copied_bytes() == copied, "the host still has it"
    signal.offer()
    wait_until(lambda: pending(memory) == dict.fromkeys(BOTH, 2 * MIB))
    resumed = memory.resume(BOTH)
    assert resumed.num_bytes == 0, "nothing is left for LOAD_TRAINER"
    kinds = [(one.kind, one.tag) for one in resumed.ended]
    assert kinds[:2] == [(MovementKind.LEAVE, tag) for tag in reversed(BOTH)]
    assert kinds[2:] == [(MovementKind.RETURN, tag) for tag in BOTH], "told once, though they returned twice"
    memory.wait_for_content()
    assert local_of(tensors[0]).data_ptr() == address
    assert bool((local_of(tensors[0]) == 3.0).all() and (tensors[1] == 4.0).all())
    # Later writes of training are copied by the next pause.
    local_of(tensors[0]).fill_(5.0)
    assert memory.pause(BOTH, makes_room=True).num_bytes == 4 * MIB
    memory.resume(BOTH)
    memory.wait_for_content()
    assert bool((local_of(tensors[0]) == 5.0).all())
    memory.close()


def test_what_has_left_waits_for_room_before_it_returns(mesh: DeviceMesh, tmp_path: Path) -> None:
    signal = RoomSignal(tmp_path / "room-request")
    memory, _tensors = growing(mesh, tmp_path)
    memory.pause(BOTH)
    wait_until(lambda: not pending(memory))
    totals = native.totals()
    native.set_host_budget(totals.mapped_bytes + totals.kept_bytes + 3 * MIB)
    try:
        signal.offer()
        wait_until(lambda: pending(memory) == {MemoryTag.WEIGHTS: 2 * MIB})
        time.sleep(0.1)
        assert pending(memory) == {MemoryTag.WEIGHTS: 2 * MIB}, "no room for the optimizer's state"
    finally:
        native.set_host_budget(0)
    wait_until(lambda: pending(memory) == dict.fromkeys(BOTH, 2 * MIB))
    memory.resume(BOTH)
    memory.close()


def test_an_earlier_return_is_reported_though_nothing_is_left_to_cancel() -> None:
    allocator = NativeAllocator(tags=[MemoryTag.WEIGHTS], device="cpu", keep={MemoryTag.WEIGHTS: Keep.CONTENT})
    with allocator.region(MemoryTag.WEIGHTS):
        weights = torch.full((64, 64), 3.0)
    returning = Returning(allocator)
    for is_cancelled in (False, True):
        allocator.pause([MemoryTag.WEIGHTS])
        returning.begin([MemoryTag.WEIGHTS], is_early=True)
        if not is_cancelled:
            returning.wait()
        assert returning.cancel(MemoryTag.WEIGHTS) is is_cancelled
        assert [one.tag for one in returning.take_ended()] == ([] if is_cancelled else [MemoryTag.WEIGHTS])
    assert bool((weights == 3.0).all())


def test_what_leaves_shows_progress_and_reaches_its_failpoints(mesh: DeviceMesh, tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, "trainer0")
    (pulse_path,) = pulse_dir(tmp_path).iterdir()
    seen: list[tuple[str, Pulse | None]] = []

    class Watching(Failpoints):
        def hit(self, point: str) -> None:
            seen.append((point, read_pulse(pulse_path)))

    memory, _tensors = growing(mesh, tmp_path, heartbeat=heartbeat, failpoints=Watching("trainer0"))
    before = native.copied_bytes()
    memory.pause(BOTH)
    wait_until(lambda: [point for point, _ in seen] == ["leave", "leave.done"])
    memory.resume(BOTH)
    memory.wait_for_content()
    assert native.copied_bytes() - before >= 2 * 2 * 64 * 64 * 4, "both tags, there and back"
    assert [point for point, _ in seen] == ["leave", "leave.done", "return.done", "return.done"]
    assert [pulse is not None and pulse.is_transferring for _, pulse in seen] == [True, True, False, False]
    memory.close()
    heartbeat.close()
