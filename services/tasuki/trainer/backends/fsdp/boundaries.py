"""Keeps inputs of a network's layers in host memory from forward to backward, with copies overlapping the computation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tasuki.trainer.backends.fsdp.host_buffers import Copy, copy_stream, release_buffers, start_copy, take_buffers
from tasuki.trainer.backends.fsdp.mesh import mesh_device

_SETTING = 'trainer.checkpointing = "offloaded"'
_ADVICE = 'lower trainer.micro_batch_tokens, or choose "full"'


class Boundaries:
    """Handles one pass at a time: `store` in the order of layers, then `load` in reverse. Uses at most two inputs' device memory.

    All host memory is allocated at start, one buffer per layer. The last layer needs none: its backward comes first.
    """

    def __init__(self, mesh: DeviceMesh, *, num_layers: int, num_bytes: int) -> None:
        """num_bytes: of the largest input of a layer. Collective. Raises as take_buffers."""
        self._device, self._last = mesh_device(mesh), num_layers - 1
        self._buffers = take_buffers(mesh, [num_bytes] * self._last, setting=_SETTING, advice=_ADVICE)
        self._to_host, self._to_device = copy_stream(self._device), copy_stream(self._device)
        self._stored: dict[int, Tensor] = {}
        """Views of the buffers."""
        self._leaving: Copy | None = None
        self._arriving: dict[int, Copy] = {}

    def store(self, layer: int, tensor: Tensor) -> None:
        self._arriving.clear()
        if self._leaving is not None:
            # From here on the computation may reuse the memory of the previous input.
            self._leaving.wait()
            self._leaving = None
        source = tensor.detach()
        if layer == self._last:
            self._arriving[layer] = Copy(source, None)
            return
        assert source.nbytes <= self._buffers[layer].nbytes, "the service refuses such samples"
        self._stored[layer] = self._buffers[layer][: source.nbytes].view(source.dtype).view(source.shape)
        self._leaving = Copy(source, start_copy(self._stored[layer], source, stream=self._to_host))

    def load(self, layer: int) -> Tensor:
        """Returns the stored input, and starts to load that of the layer before."""
        copy = self._arriving.pop(layer) if layer in self._arriving else self._fetch(layer)
        copy.wait()
        if layer > 0:
            self._arriving[layer - 1] = self._fetch(layer - 1)
        return copy.tensor

    def close(self) -> None:
        """Frees the host memory."""
        release_buffers(self._buffers, device=self._device)
        self._stored.clear()
        self._buffers = []

    def _fetch(self, layer: int) -> Copy:
        tensor = torch.empty_like(self._stored[layer], device=self._device)
        return Copy(tensor, start_copy(tensor, self._stored[layer], stream=self._to_device))
