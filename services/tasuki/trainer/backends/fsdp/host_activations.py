"""Keeps tensors of a network's layers in host memory from forward to backward, with copies overlapping the computation."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tasuki.trainer.backends.fsdp.host_buffers import Copy, copy_stream, release_buffers, start_copy, take_buffers
from tasuki.trainer.replicas import mesh_device

_SETTING = 'trainer.checkpointing = "offloaded"'
_ADVICE = 'lower trainer.micro_batch_tokens, or choose "full"'


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
        self._buffers = take_buffers(mesh, [num_bytes] * self._last, setting=_SETTING, advice=_ADVICE)
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
