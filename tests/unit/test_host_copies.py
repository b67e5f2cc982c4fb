"""Host copies of paused memory: made before the first pause, and repeated only for bytes that may have changed."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from tasuki.trainer.backends.fsdp.memory import FsdpMemory
from tasuki.trainer.resident_tags import ExportChoice, ResidentTags
from tasuki.wire.stages import MemoryTag

MIB = 2**20
BOTH = [MemoryTag.WEIGHTS, MemoryTag.OPTIMIZER]


def parameter(memory: FsdpMemory, mesh: DeviceMesh, value: float, *, is_frozen: bool) -> Parameter:
    with memory.region(MemoryTag.WEIGHTS):
        local = torch.full((64, 64), value)
    return Parameter(DTensor.from_local(local, mesh, [Shard(0)]), requires_grad=not is_frozen)


def local_of(one: Parameter) -> torch.Tensor:
    assert isinstance(one.data, DTensor)
    return one.data.to_local()


def test_a_frozen_parameter_is_copied_to_the_host_once_and_comes_back_every_time(mesh: DeviceMesh) -> None:
    memory = FsdpMemory(mesh, ExportChoice(of_parameters=False, stays=True))
    base, adapter = parameter(memory, mesh, 1.0, is_frozen=True), parameter(memory, mesh, 2.0, is_frozen=False)
    memory.freeze([base])
    for turn in range(3):
        local_of(adapter).fill_(float(turn))
        assert memory.pause_tags([MemoryTag.WEIGHTS]) > 0
        memory.resume_tags([MemoryTag.WEIGHTS])
        assert bool((local_of(base) == 1.0).all() and (local_of(adapter) == turn).all())
    # If the promise is broken, the old copy comes back.
    local_of(base).fill_(9.0)
    memory.pause_tags([MemoryTag.WEIGHTS])
    memory.resume_tags([MemoryTag.WEIGHTS])
    assert bool((local_of(base) == 1.0).all())


def test_what_stays_leaves_only_to_make_room(mesh: DeviceMesh) -> None:
    staying = ResidentTags(frozenset({MemoryTag.WEIGHTS}))
    memory = FsdpMemory(mesh, ExportChoice(of_parameters=False, stays=True), resident=staying)
    kept = parameter(memory, mesh, 3.0, is_frozen=False)
    with memory.region(MemoryTag.OPTIMIZER):
        moment = torch.full((64, 64), 4.0)

    def mapped() -> dict[str, tuple[bool, bool]]:
        return {MemoryTag.known(usage.tag): (usage.stays, bool(usage.mapped_bytes)) for usage in memory.usage()}

    assert memory.pause_tags(BOTH) == 2 * MIB
    assert mapped()["weights"] == (True, True) and mapped()["optimizer"] == (False, False)
    assert bool((local_of(kept) == 3.0).all())
    assert memory.resume_tags(BOTH) == 2 * MIB
    assert memory.pause_tags(BOTH, makes_room=True) == 4 * MIB
    assert mapped()["weights"] == (True, False)
    assert memory.resume_tags(BOTH) == 4 * MIB
    memory.wait_for_content()
    assert bool((local_of(kept) == 3.0).all() and (moment == 4.0).all())
