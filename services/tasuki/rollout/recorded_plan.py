"""The part of a copy plan that depends on the engine and on the published layout, but on no trainer: made ahead of the first sync."""

from __future__ import annotations

import torch

from tasuki.rollout.fingerprint import Fingerprint
from tasuki.rollout.record import EngineModel, Layout, Parameters, record
from tasuki.weights.checksum import checksum
from tasuki.weights.copies import ViewChecksum, ViewCopy, prepare_checksums, prepare_copies
from tasuki.weights.plan import Constant, whole


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
