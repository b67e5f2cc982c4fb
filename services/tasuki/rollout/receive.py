"""Runs in every engine rank: brings published weights into the live model by a copy plan and reads them back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tasuki.rollout.record import EngineModel, Parameters, record_plan
from tasuki.transport.checksum import checksum
from tasuki.transport.imported_weights import ImportedWeights, import_weights
from tasuki.transport.plan import CopyPlan, Slice, split_by_rows, whole
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
            self._imported = import_weights(weights, timeout_s=timeout_s)
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
        self._copies = [
            (parameters.view(piece.parameter, copy.destination), _strided(imported.tensor(copy.entry), copy.source))
            for piece in plan.pieces
            for copy in split_by_rows(piece, imported.entries[piece.name])
        ]
        self._constants = [(constant, parameters.view(constant.parameter, constant.destination)) for constant in plan.constants]
        fallback_bytes = sum(entry.num_bytes for name in plan.fallback_names for entry in imported.entries[name])
        self.copied_bytes = fallback_bytes + sum(source.numel() * source.element_size() for _, source in self._copies)

    @torch.no_grad()
    def replay(self, model: EngineModel) -> None:
        """Writes every parameter and returns when the copies are done."""
        for destination, source in self._copies:
            destination.copy_(source)
        for constant, destination in self._constants:
            destination.fill_(constant.value)
        if self.plan.fallback_names:
            model.load_weights([(name, self._imported.gathered(name)) for name in self.plan.fallback_names])
        if self.parameters.device.type == "cuda":
            torch.cuda.synchronize(self.parameters.device)

    @torch.no_grad()
    def read_back(self) -> tuple[tuple[str, Slice, int], ...]:
        """Checksums of what the parameters now hold; for fallback tensors, which the engine transformed, of what it was given.

        Raises WeightsCorrupt naming a parameter whose constant rows differ.
        """
        for constant, values in self._constants:
            if bool((values != constant.value).any()):
                raise WeightsCorrupt(
                    f"{constant.parameter}: rows that must be {constant.value} are not", tensors=constant.parameter
                )
        layout = self._imported.layout()
        sums: list[tuple[str, Slice, int]] = []
        for piece in self.plan.pieces:
            held = self.parameters.view(piece.parameter, piece.destination)
            sums.append((piece.name, piece.source, checksum(held, piece.source, dtype=layout[piece.name][1])))
        for name in self.plan.fallback_names:
            where = whole(layout[name][0])
            sums.append((name, where, checksum(self._imported.gathered(name), where)))
        return tuple(sums)


def _strided(tensor: torch.Tensor, at: Slice) -> torch.Tensor:
    return tensor.as_strided(at.shape, at.strides, tensor.storage_offset() + at.offset)


def _refuse_packed(model: EngineModel) -> None:
    if isinstance(model, torch.nn.Module):
        for name, module in model.named_modules():
            if getattr(module, "use_intel_amx_backend", False):
                raise UnsupportedModel(
                    f"the weights of {name} are packed for AMX, which a copy plan cannot express", module=name
                )
