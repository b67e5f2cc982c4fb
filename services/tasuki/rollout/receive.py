"""Runs in every engine rank: brings published weights into the live model by a copy plan and reads them back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tasuki.rollout.record import EngineModel, Parameters, record_plan
from tasuki.transport.checksum import checksum
from tasuki.transport.copies import ViewChecksum, ViewCopy, prepare_checksums, prepare_copies
from tasuki.transport.imported_weights import ImportedWeights, import_weights
from tasuki.transport.plan import Constant, CopyPlan, Slice, split_by_rows, whole
from tasuki.v1 import weights_pb2
from tasuki.wire.errors import UnsupportedModel, WeightsCorrupt


@dataclass(frozen=True, slots=True)
class Received:
    """What one sync did on one rank."""

    copied_bytes: int
    fallback_names: tuple[str, ...]
    timings: dict[str, float]
    checksums: tuple[tuple[str, Slice, int], ...]
    """Checkpoint name, slice of it that the rank holds, checksum as read back."""


@dataclass(slots=True)
class WeightReceiver:
    """One engine rank's end of the weight exchange. Keeps the imported arenas and the plan from sync to sync."""

    model: EngineModel
    _imported: ImportedWeights | None = None
    _prepared: _PreparedPlan | None = None
    _timings: dict[str, float] = field(default_factory=dict)

    @property
    def plan(self) -> CopyPlan | None:
        """The plan of the last sync."""
        return None if self._prepared is None else self._prepared.plan

    def receive(self, weights: weights_pb2.PublishedWeights, *, import_timeout_s: float) -> Received:
        """Copies the published version into the model, waits for the copies, and reads them back.

        Raises BadHandle or VersionOrder before anything is written; after any other error the model must not be served.
        """
        self._timings = dict.fromkeys(("import", "record", "copy", "verify"), 0.0)
        with self._timed("import"):
            imported = self._import(weights, import_timeout_s)
        try:
            return self._receive(imported, weights)
        finally:
            imported.let_go()

    def _receive(self, imported: ImportedWeights, weights: weights_pb2.PublishedWeights) -> Received:
        imported.check_version(weights.policy_version)
        with self._timed("record"):
            prepared = self._prepare(imported)
        with self._timed("copy"):
            prepared.replay(self.model)
        with self._timed("verify"):
            checksums = prepared.read_back()
            # The trainer may have begun to overwrite what was being copied.
            imported.check_version(weights.policy_version)
        return Received(prepared.copied_bytes, prepared.plan.fallback_names, dict(self._timings), checksums)

    def _import(self, weights: weights_pb2.PublishedWeights, timeout_s: float) -> ImportedWeights:
        if self._imported is None or not self._imported.is_of(weights):
            self._prepared = None
            if self._imported is not None:
                self._imported.close()
                self._imported = None
            self._imported = import_weights(weights, timeout_s=timeout_s, device=Parameters(self.model).device)
        self._imported.renew(weights, timeout_s=timeout_s)
        return self._imported

    def _prepare(self, imported: ImportedWeights) -> _PreparedPlan:
        parameters = Parameters(self.model)
        if self._prepared is None or self._prepared.parameters.fingerprint() != parameters.fingerprint():
            _refuse_packed(self.model)
            self._prepared = _PreparedPlan(record_plan(self.model, imported), parameters, imported)
        return self._prepared

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._timings[name] = time.perf_counter() - start


class _PreparedPlan:
    """A plan with its views made: replaying it is nothing but copies."""

    def __init__(self, plan: CopyPlan, parameters: Parameters, imported: ImportedWeights) -> None:
        self.plan, self.parameters = plan, parameters
        self._imported = imported
        device = parameters.device
        copies = [
            ViewCopy(
                parameters.view(piece.parameter, copy.destination),
                _strided(imported.tensor(copy.entry), copy.source),
                imported.owner(copy.entry),
            )
            for piece in plan.pieces
            for copy in split_by_rows(piece, imported.entries[piece.name])
        ]
        fallback_bytes = sum(entry.num_bytes for name in plan.fallback_names for entry in imported.entries[name])
        self.copied_bytes = fallback_bytes + sum(copy.source.numel() * copy.source.element_size() for copy in copies)
        constants = [
            (parameters.view(constant.parameter, constant.destination), _expanded(constant, parameters))
            for constant in plan.constants
        ]
        fills = [ViewCopy(held, value) for held, value in constants]
        self._copies = prepare_copies([*copies, *fills], device=device, first_owner=imported.first_owner(device))
        layout = imported.layout()
        views = [
            ViewChecksum(parameters.view(piece.parameter, piece.destination), piece.source, layout[piece.name][1])
            for piece in plan.pieces
        ]
        views += [ViewChecksum(held, whole(held.shape), held.dtype) for held, _ in constants]
        self._checksums = prepare_checksums(views, device=device)
        self._constant_sums = [checksum(value, whole(value.shape)) for _, value in constants]

    @torch.no_grad()
    def replay(self, model: EngineModel) -> None:
        """Writes every parameter and returns when the copies are done."""
        self._copies.start()
        if self.plan.fallback_names:
            model.load_weights([(name, self._imported.gathered(name)) for name in self.plan.fallback_names])
        if self.parameters.device.type == "cuda":
            torch.cuda.synchronize(self.parameters.device)

    @torch.no_grad()
    def read_back(self) -> tuple[tuple[str, Slice, int], ...]:
        """Checksums of what the parameters now hold; for fallback tensors, which the engine transformed, of what it was given.

        Raises WeightsCorrupt naming a parameter whose constant rows differ.
        """
        sums = self._checksums.read()
        num_pieces = len(self.plan.pieces)
        for constant, expected, held in zip(self.plan.constants, self._constant_sums, sums[num_pieces:], strict=True):
            if held != expected:
                raise WeightsCorrupt(
                    f"{constant.parameter}: rows that must be {constant.value} are not", tensors=constant.parameter
                )
        pieces = [(piece.name, piece.source, sums[index]) for index, piece in enumerate(self.plan.pieces)]
        layout = self._imported.layout()
        for name in self.plan.fallback_names:
            where = whole(layout[name][0])
            pieces.append((name, where, checksum(self._imported.gathered(name), where)))
        return tuple(pieces)


def _expanded(constant: Constant, parameters: Parameters) -> torch.Tensor:
    """The constant in the shape of its destination, one element in memory."""
    value = torch.tensor(constant.value, dtype=parameters.dtype(constant.parameter), device=parameters.device)
    return value.expand(constant.destination.shape)


def _strided(tensor: torch.Tensor, at: Slice) -> torch.Tensor:
    return tensor.as_strided(at.shape, at.strides, tensor.storage_offset() + at.offset)


def _refuse_packed(model: EngineModel) -> None:
    if isinstance(model, torch.nn.Module):
        for name, module in model.named_modules():
            if getattr(module, "use_intel_amx_backend", False):
                raise UnsupportedModel(
                    f"the weights of {name} are packed for AMX, which a copy plan cannot express", module=name
                )
