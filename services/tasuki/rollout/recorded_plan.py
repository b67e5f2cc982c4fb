"""The part of a copy plan that depends on the engine and on the published layout, but on no trainer: made ahead of the first sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tasuki.rollout.record import EngineModel, Layout, Parameters, record
from tasuki.weights.checksum import checksum
from tasuki.weights.copies import ViewChecksum, ViewCopy, prepare_checksums, prepare_copies
from tasuki.weights.plan import Constant, whole


class Fingerprint:
    """Locations of a model's parameters. Cheap enough for every sync: it looks up no names and creates no views.

    Keeps the parameters' memory alive, so that writing there is safe even if the parameters have moved.
    """

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
        self._children = self._children_now()
        # Held so that no new object can get the identity of an old one.
        self._parameters = self._parameters_now()
        self._places = _places(self._parameters)
        self._memory = [parameter.data for parameter in self._parameters]
        self._addresses = _addresses(self._memory)

    def is_memory_held(self) -> bool:
        """Whether the memory is still in place. A fast check only; a storage can be resized even while held."""
        return _addresses(self._memory) == self._addresses

    def is_current(self) -> bool:
        """Whether an existing plan still applies: the same modules with the same parameters at the same addresses."""
        children, parameters = self._children_now(), self._parameters_now()
        return (
            _are_same(children, self._children)
            and _are_same(parameters, self._parameters)
            and _places(parameters) == self._places
        )

    def _children_now(self) -> list[torch.nn.Module | None]:
        return [child for module in self._modules for child in module._modules.values()]

    def _parameters_now(self) -> list[torch.nn.Parameter]:
        if not self._modules:
            return [parameter for _, parameter in self._model.named_parameters()]
        return [parameter for module in self._modules for parameter in module._parameters.values() if parameter is not None]


def _are_same(left: Sequence[object], right: Sequence[object]) -> bool:
    return list(map(id, left)) == list(map(id, right))


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _places(parameters: list[torch.nn.Parameter]) -> list[tuple[object, ...]]:
    return [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in parameters]


class RecordedPlan:
    """A recording of a model's loader, and what reads its slices back and fills its constants.

    Reads and writes no parameter, so it can be made while they have no pages.
    """

    def __init__(self, model: EngineModel, layout: Layout) -> None:
        """Raises as `record`."""
        self.fingerprint, self.parameters = Fingerprint(model), Parameters(model)
        self.recording = record(model, layout)
        parameters, device = self.parameters, self.parameters.device
        views = [
            ViewChecksum(parameters.view(piece.parameter, piece.destination), piece.source, layout[piece.name][1])
            for piece in self.recording.pieces
        ]
        self.checksums = prepare_checksums(views, device=device)
        constants = [
            (parameters.view(constant.parameter, constant.destination), _expanded(constant, parameters))
            for constant in self.recording.constants
        ]
        self.fills = prepare_copies([ViewCopy(filled, value) for filled, value in constants], device=device)
        filled = [ViewChecksum(filled, whole(filled.shape), filled.dtype) for filled, _ in constants]
        self.fill_checksums = prepare_checksums(filled, device=device)
        self.fill_sums = [checksum(value, whole(value.shape)) for _, value in constants]

    def applies_to(self, layout: Layout) -> bool:
        """Whether tensors of `layout` become the parameters in this way: both are as they were recorded."""
        return self.recording.layout == layout and self.fingerprint.is_memory_held() and self.fingerprint.is_current()


def _expanded(constant: Constant, parameters: Parameters) -> torch.Tensor:
    """The constant in the shape of its destination, as one element in memory."""
    value = torch.tensor(constant.value, dtype=parameters.dtype(constant.parameter), device=parameters.device)
    return value.expand(constant.destination.shape)
