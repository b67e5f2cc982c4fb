"""Memory of one rank's shards by tag, and host memory for shards and activations."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tasuki.memory.granularity import ALIGNMENT, rounded_up
from tasuki.trainer.host_buffers import Copy, copy_stream, release_buffers, start_copy, take_buffers
from tasuki.trainer.memory import TrainerMemory
from tasuki.trainer.replicas import mesh_device
from tasuki.trainer.resident_tags import Onload
from tasuki.wire.stages import MemoryTag


class FsdpMemory(TrainerMemory):
    """Pausable memory of one rank's shards. Each FSDP group's forward pass waits, on the GPU, for its own."""

    def freeze(self, tensors: Iterable[Tensor]) -> None:
        super().freeze(cast(DTensor, tensor.data).to_local() for tensor in tensors)

    def make_gradients(self, parameters: Iterable[Parameter]) -> list[Tensor]:
        """Allocates zero gradients for all parameters, into which FSDP2 then accumulates in place. Returns this rank's shards."""
        made: list[Tensor] = []
        with self.region(MemoryTag.GRADIENTS):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
                made.append(cast(DTensor, parameter.grad).to_local())
        self.clear_at_resume(made)
        return made

    def guard(self, groups: Iterable[FSDPModule]) -> None:
        """See `guard`. Does nothing on a CPU, where copies are synchronous."""
        if self._device.type == "cuda":
            guard(groups, self._onload)


def guard(groups: Iterable[FSDPModule], onload: Onload) -> None:
    """Lets forward passes through `groups` begin before all weights are back. Other readers of weights need `Onload.wait`."""
    for group in groups:
        assert isinstance(group, nn.Module)
        shards = [(shard.data_ptr(), shard.nbytes) for shard in _shards(group) if shard.numel()]
        if shards:
            # FSDP's own hook, which gathers the group, runs afterwards.
            group.register_forward_pre_hook(partial(_await_shard, onload, max(shards)), prepend=True)


def _await_shard(onload: Onload, last: tuple[int, int], group: nn.Module, _inputs: object) -> None:
    """last: address and size of the group's highest shard; lower ones arrive first."""
    address, num_bytes = last
    for stream in (torch.cuda.current_stream(), _gathering_stream(group)) if onload.brings_weights else ():
        if stream is not None:
            onload.wait_on_stream(stream.cuda_stream, address=address, num_bytes=num_bytes)


def _shards(group: nn.Module) -> Iterator[Tensor]:
    """Parameters of the group, without those of nested groups."""
    for parameter in group.parameters(recurse=False):
        assert isinstance(parameter, DTensor)
        yield parameter.to_local()
    for child in group.children():
        if not isinstance(child, FSDPModule):
            yield from _shards(child)


def _gathering_stream(group: nn.Module) -> torch.cuda.Stream | None:
    """Stream on which FSDP2 reads shards; None before its first pass, whose streams wait for the current one."""
    assert isinstance(group, FSDPModule)
    return getattr(group._get_fsdp_state()._comm_ctx, "all_gather_copy_in_stream", None)


_OFFLOADED = 'trainer.checkpointing = "offloaded"'
_ADVICE = 'lower trainer.micro_batch_tokens, or choose "full"'


class HostShards:
    """Host memory for one network's shards, taken once."""

    def __init__(self, mesh: DeviceMesh, *, setting: str, advice: str) -> None:
        """setting, advice: as for take_buffers."""
        self._mesh, self._setting, self._advice = mesh, setting, advice
        self._buffers: list[Tensor] = []

    @property
    def policy(self) -> CPUOffloadPolicy:
        return CPUOffloadPolicy(pin_memory=self._mesh.device_type == "cuda")

    def make(self, network: nn.Module) -> Callable[[Tensor], Tensor]:
        """Function that replaces a parameter by its shard in this memory. network: sharded, on meta. Collective. Raises as take_buffers.

        FSDP2 copies a shard that it has to pad, so those stay outside.
        """
        sizes = {id(param): _local(param).nbytes for param in network.parameters() if _is_even(param)}
        starts, total = dict[int, int](), 0
        for key, size in sizes.items():
            starts[key], total = total, total + rounded_up(size, ALIGNMENT)
        self._buffers = take_buffers(self._mesh, [total], setting=self._setting, advice=self._advice)

        def place(param: Tensor) -> Tensor:
            made = torch.empty_like(param, device="cpu")
            if id(param) in starts:
                local, start = _local(made), starts[id(param)]
                view = self._buffers[0][start : start + local.nbytes].view(local.dtype).view(local.shape)
                cast(Any, local).set_(view)  # torch declares it for storages alone
            return made

        return place

    def close(self) -> None:
        """Waits for copies and frees the memory."""
        release_buffers(self._buffers, device=mesh_device(self._mesh))
        self._buffers = []


@torch.no_grad()
def _local(param: Tensor) -> Tensor:
    """The shard itself, not a view of it."""
    return cast(DTensor, param).to_local()


def _is_even(param: Tensor) -> bool:
    assert isinstance(param, DTensor)
    return param.shape[0] % param.device_mesh.size() == 0


@dataclass(slots=True)
class _Stored:
    """A layer's tensors in its buffer."""

    first: int
    """Index of the first tensor. No later pass has an index of this one."""
    tensors: dict[int, Tensor] = field(default_factory=dict)
    """Views of the buffer, by index."""
    count: int = 0
    """Number of tensors, including those that stayed on the device."""
    num_bytes: int = 0
    """Used of the buffer."""


class HostActivations:
    """Handles one pass at a time: `begin` and `store` in the order of layers, then `load` in reverse.

    Uses device memory for two layers' tensors. All host memory is allocated at start, one buffer per layer. The last layer needs none: its
    backward comes first. What does not fit in a buffer stays on the device.
    """

    def __init__(self, mesh: DeviceMesh, *, num_layers: int, num_bytes: int) -> None:
        """num_layers: that store something. num_bytes: per layer. Collective. Raises as take_buffers."""
        self._device, self._last = mesh_device(mesh), num_layers - 1
        self._buffers = take_buffers(mesh, [num_bytes] * self._last, setting=_OFFLOADED, advice=_ADVICE)
        self._to_host, self._to_device = copy_stream(self._device), copy_stream(self._device)
        self._stored: dict[int, _Stored] = {}
        self._num_stored = 0
        self._leaving: deque[list[Copy]] = deque()
        self._on_device: dict[int, dict[int, Copy]] = {}
        """Tensors that arrive or have stayed, by layer and index, until they are loaded."""

    def begin(self, layer: int) -> None:
        """Says that a layer's forward pass begins."""
        self._stored[layer] = _Stored(self._num_stored)
        self._on_device[layer] = {}

    def store(self, layer: int, tensors: Sequence[Tensor]) -> int:
        """Returns the index of the first one, which the others' follow."""
        self._release(all_but=1)
        stored, leaving = self._stored[layer], list[Copy]()
        first = stored.first + stored.count
        for index, tensor in enumerate(tensors, first):
            source = tensor.detach()
            held = self._room(layer, source)
            if held is None:
                self._on_device[layer][index] = Copy(source, None)
            else:
                stored.tensors[index] = held
                leaving.append(Copy(source, start_copy(held, source, stream=self._to_host)))
        stored.count += len(tensors)
        self._num_stored += len(tensors)
        if leaving:
            self._leaving.append(leaving)
        return first

    def load(self, layer: int, index: int) -> Tensor:
        """Returns a stored tensor, once. With its first one, starts to load those of the layer before.

        Raises RuntimeError if a later pass has taken its place.
        """
        self._release(all_but=0)
        first = self._stored[layer].first
        if index < first:
            raise RuntimeError(f"a later forward pass has replaced what layer {layer} had stored; run backward before it")
        if index not in self._on_device[layer]:
            self._fetch(layer)
        copy = self._on_device[layer].pop(index)
        copy.wait()
        if index == first and layer > 0:
            self._fetch(layer - 1)
        return copy.tensor

    def close(self) -> None:
        """Frees the host memory."""
        release_buffers(self._buffers, device=self._device)
        self._stored.clear()
        self._on_device.clear()
        self._buffers = []

    def _release(self, *, all_but: int) -> None:
        """Lets the computation from here on reuse the memory of what has left, except what was stored last."""
        while len(self._leaving) > all_but:
            for copy in self._leaving.popleft():
                copy.wait()

    def _room(self, layer: int, source: Tensor) -> Tensor | None:
        """A tensor like `source` in the layer's buffer; None if it has no room."""
        stored = self._stored[layer]
        end = stored.num_bytes + source.nbytes
        if layer == self._last or end > self._buffers[layer].nbytes:
            return None
        flat = self._buffers[layer][stored.num_bytes : end].view(source.dtype)
        stored.num_bytes = end
        return flat.as_strided(source.shape, torch.empty_like(source, device="meta").stride())

    def _fetch(self, layer: int) -> None:
        for index, held in self._stored[layer].tensors.items():
            tensor = torch.empty_like(held, device=self._device)
            self._on_device[layer][index] = Copy(tensor, start_copy(tensor, held, stream=self._to_device))
