"""Activations and buffers in host memory."""

from itertools import chain

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tasuki.trainer.backends.fsdp.memory import HostActivations
from tasuki.trainer.host_buffers import pin


class Runtime:
    """Pins up to `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room, self.pinned = room, dict[int, int]()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert (address not in self.pinned, flags) == (True, 0)
        if sum(self.pinned.values()) + num_bytes > self.room:
            return 2  # cudaErrorMemoryAllocation
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.mark.parametrize(("room", "is_pinned"), [(300, True), (299, False), (50, False)])
def test_all_buffers_are_pinned_or_none(room: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(room)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffers = [torch.empty(100, dtype=torch.uint8) for _ in range(3)]
    assert pin(buffers) is is_pinned
    assert list(runtime.pinned) == ([buffer.data_ptr() for buffer in buffers] if is_pinned else [])


NUM_LAYERS, NUM_TOKENS = 3, 16
BYTES = 4 * NUM_TOKENS


def tensors_of(layer: int) -> list[list[Tensor]]:
    """An input, and two results of one operator, of which one lies transposed."""
    generator = torch.Generator().manual_seed(layer)
    of_input, out, sums = (torch.randn(4, NUM_TOKENS // 4, generator=generator) for _ in range(3))
    return [[of_input], [out.T, sums]]


def run(activations: HostActivations) -> None:
    """Makes a forward and a backward pass."""
    places: list[list[int]] = []
    for layer in range(NUM_LAYERS):
        activations.begin(layer)
        indices: list[int] = []
        for group in tensors_of(layer):
            first = activations.store(layer, group)
            indices += range(first, first + len(group))
        places.append(indices)
    for layer in reversed(range(NUM_LAYERS)):
        for index, expected in zip(places[layer], chain.from_iterable(tensors_of(layer)), strict=True):
            found = activations.load(layer, index)
            assert torch.equal(found, expected) and found.stride() == expected.stride()


@pytest.mark.parametrize("num_bytes", [3 * BYTES, 2 * BYTES, BYTES, 0])
def test_everything_returns_whether_or_not_there_is_room(mesh: DeviceMesh, num_bytes: int) -> None:
    activations = HostActivations(mesh, num_layers=NUM_LAYERS, num_bytes=num_bytes)
    for _ in range(2):
        run(activations)
    activations.close()


def test_nothing_is_held_once_it_was_loaded(mesh: DeviceMesh) -> None:
    activations = HostActivations(mesh, num_layers=NUM_LAYERS, num_bytes=2 * BYTES)
    run(activations)
    assert not any(activations._on_device.values())


def test_what_a_later_pass_has_replaced_is_refused(mesh: DeviceMesh) -> None:
    activations = HostActivations(mesh, num_layers=NUM_LAYERS, num_bytes=BYTES)
    indices: list[int] = []
    for _ in range(2):
        for layer in range(NUM_LAYERS):
            activations.begin(layer)
            indices.append(activations.store(layer, [torch.ones(NUM_TOKENS)]))
    for layer in range(NUM_LAYERS):
        with pytest.raises(RuntimeError, match=f"replaced what layer {layer} had stored"):
            activations.load(layer, indices[layer])
    for layer in reversed(range(NUM_LAYERS)):
        assert torch.equal(activations.load(layer, indices[NUM_LAYERS + layer]), torch.ones(NUM_TOKENS))
