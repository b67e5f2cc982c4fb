"""Runs in every engine rank: copies published weights into the live model by a copy plan and computes checksums of the result.

What depends on the engine and the published layout, but on no trainer, is recorded ahead of the first sync.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from tasuki.rollout.record import EngineModel, Layout, Parameters, complete_plan, record
from tasuki.rpc.failpoints import NO_FAILPOINTS, RECEIVED, Failpoints
from tasuki.v1 import weights_pb2
from tasuki.weights.checksum import checksum
from tasuki.weights.copies import ViewCopy, compile_copies, prepare_copies
from tasuki.weights.imported_weights import HeldSlice, ImportedWeights, import_weights
from tasuki.weights.plan import Constant, CopyPlan, Slice, whole
from tasuki.weights.split import split_by_entries
from tasuki.wire.errors import InternalError, UnsupportedModel, WeightsCorrupt


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
        self.layout, self.plan = layout, record(model, layout)
        parameters, device = self.parameters, self.parameters.device
        views = [
            ViewCopy(
                held=parameters.view(piece.parameter, piece.destination),
                where=piece.source,
                counted=layout[piece.name][1],
                slot=slot,
            )
            for slot, piece in enumerate(self.plan.pieces)
        ]
        self.checksums = prepare_copies(views, num_sums=len(views), device=device)
        constants = [
            (parameters.view(constant.parameter, constant.destination), _expanded(constant, parameters))
            for constant in self.plan.constants
        ]
        filled = [
            ViewCopy(held=held, source=value, where=whole(held.shape), slot=slot)
            for slot, (held, value) in enumerate(constants)
        ]
        self.fills = prepare_copies(filled, num_sums=len(filled), device=device)
        self.fill_checksums = prepare_copies(
            [replace(each, source=None) for each in filled], num_sums=len(filled), device=device
        )
        self.fill_sums = np.array([checksum(value, whole(value.shape)) for _, value in constants], dtype=np.uint64)

    def applies_to(self, layout: Layout) -> bool:
        """Whether tensors of `layout` become the parameters in this way: both are as they were recorded."""
        return self.layout == layout and self.fingerprint.is_memory_held() and self.fingerprint.is_current()


def _expanded(constant: Constant, parameters: Parameters) -> torch.Tensor:
    """The constant in the shape of its destination, as one element in memory."""
    value = torch.tensor(constant.value, dtype=parameters.dtype(constant.parameter), device=parameters.device)
    return value.expand(constant.destination.shape)


@dataclass(frozen=True, slots=True)
class Received:
    """Result of one sync on one rank."""

    copied_bytes: int
    fallback_names: tuple[str, ...]
    timings: dict[str, float]
    held: tuple[HeldSlice, ...]
    """The slices that the rank holds; the same object while the plan is unchanged."""
    sums: np.ndarray
    """uint64 checksum of each slice, over its memory after the copy."""

    @property
    def checksums(self) -> tuple[tuple[str, Slice, int], ...]:
        return tuple((name, source, value) for (name, source), value in zip(self.held, self.sums.tolist(), strict=True))


@dataclass(slots=True)
class WeightReceiver:
    """One engine rank's side of the weight exchange. Keeps imported arenas and the plan between syncs."""

    model: EngineModel
    failpoints: Failpoints = field(default=NO_FAILPOINTS, kw_only=True)
    _imported: ImportedWeights | None = None
    _recorded: RecordedPlan | None = None
    """From `record_ahead` or the last sync that recorded; outlives a trainer."""
    _prepared: "_PreparedPlan | None" = None
    _timings: dict[str, float] = field(default_factory=dict)

    @property
    def plan(self) -> CopyPlan | None:
        """Plan of the last sync."""
        return None if self._prepared is None else self._prepared.plan

    def warm_up(self) -> None:
        """Compiles on a GPU what the first sync would, which takes a second on a new machine."""
        parameters = Parameters(self.model)
        for dtype in parameters.dtypes:
            compile_copies(dtype, device=parameters.device)

    @torch.no_grad()
    def record_ahead(self, layout: Layout) -> None:
        """Records the plan for tensors of `layout` before they are published. A sync of other tensors, or into others, records its own.

        Raises UnsupportedModel, or what the engine's loader raises; the first sync then records.
        """
        self._recorded = RecordedPlan(self.model, layout)

    def receive(self, weights: weights_pb2.PublishedWeights, *, import_timeout_s: float) -> Received:
        """Copies the published version into the model, computes checksums, and waits for both.

        Raises BadHandle or VersionOrder before anything is written. After any other error the model must not be served.
        """
        self._timings = dict.fromkeys(("import", "record", "copy", "verify"), 0.0)
        with self._timed("import"):
            imported = self._import(weights, import_timeout_s)
        try:
            return self._receive(imported, weights)
        finally:
            imported.release()

    def _receive(self, imported: ImportedWeights, weights: weights_pb2.PublishedWeights) -> Received:
        # If parameters have moved, the second attempt fills their new memory.
        prepared = self._replay(imported) or self._replay(imported)
        if prepared is None:
            raise InternalError("the engine's model parameters keep moving")
        with self._timed("verify"):
            is_damaged = self.failpoints.corrupts(RECEIVED)
            if is_damaged:
                self._damage(prepared.plan)
            sums = prepared.sums(read_back=is_damaged)
            # The trainer may have begun to overwrite the source during the copy.
            imported.check_version(weights.policy_version)
        return Received(prepared.copied_bytes, prepared.plan.fallback_names, dict(self._timings), prepared.held, sums)

    def _damage(self, plan: CopyPlan) -> None:
        """Injected fault: changes one element of a parameter, after the copies and their checksums."""
        piece = plan.pieces[0]
        held = Parameters(self.model).view(piece.parameter, piece.destination)
        held[(0,) * held.dim()].neg_()

    def _import(self, weights: weights_pb2.PublishedWeights, timeout_s: float) -> ImportedWeights:
        if self._imported is None or not self._imported.is_of(weights):
            self._prepared = None
            if self._imported is not None:
                self._imported.close()
                self._imported = None
            self._imported = import_weights(weights, timeout_s=timeout_s, device=Parameters(self.model).device)
        self._imported.hold(weights, timeout_s=timeout_s)
        return self._imported

    def _replay(self, imported: ImportedWeights) -> "_PreparedPlan | None":
        """Copies the weights.

        Returns None if parameters have moved: the copies went to their old place, and a new plan is needed.
        """
        with self._timed("record"):
            prepared = self._prepare(imported)
        with self._timed("copy"):
            prepared.start()
            # Checked while the copies run; they write to memory that the plan keeps alive, wherever the parameters are.
            is_current = prepared.recorded.fingerprint.is_current()
            prepared.finish(self.model)
        if is_current:
            return prepared
        self._prepared = None
        return None

    def _prepare(self, imported: ImportedWeights) -> "_PreparedPlan":
        if self._prepared is None or not self._prepared.recorded.fingerprint.is_memory_held():
            _refuse_packed(self.model)
            recorded, layout = self._recorded, imported.layout()
            if recorded is None or not recorded.applies_to(layout):
                self._recorded = None
                recorded = self._recorded = RecordedPlan(self.model, layout)
            self._prepared = _PreparedPlan(complete_plan(recorded.plan, self.model, imported), recorded, imported)
        return self._prepared

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._timings[name] += time.perf_counter() - start


class _PreparedPlan:
    """A plan with its views created, so that replaying it is only copies and checksums."""

    def __init__(self, plan: CopyPlan, recorded: RecordedPlan, imported: ImportedWeights) -> None:
        self.plan, self.recorded, self._imported = plan, recorded, imported
        parameters = recorded.parameters
        self._device = device = parameters.device
        copies = [
            ViewCopy(
                held=parameters.view(piece.parameter, copy.destination),
                source=_strided(imported.tensor(copy.entry), copy.source),
                where=copy.where,
                slot=slot,
                owner=imported.owner(copy.entry),
            )
            for slot, piece in enumerate(plan.pieces)
            for copy in split_by_entries(piece, imported.entries[piece.name])
        ]
        fallback_bytes = sum(entry.num_bytes for name in plan.fallback_names for entry in imported.entries[name])
        self.copied_bytes = fallback_bytes + sum(copy.source.nbytes for copy in copies if copy.source is not None)
        first_owner = imported.first_owner(device)
        self._copies = prepare_copies(copies, num_sums=len(plan.pieces), device=device, first_owner=first_owner)
        layout = imported.layout()
        held = [(piece.name, piece.source) for piece in plan.pieces]
        self.held = (*held, *((name, whole(layout[name][0])) for name in plan.fallback_names))
        self._is_proven = False

    @torch.no_grad()
    def start(self) -> None:
        """Starts to write all parameters except those written by the engine's own loader."""
        self._copies.start()
        self.recorded.fills.start()

    @torch.no_grad()
    def finish(self, model: EngineModel) -> None:
        """Writes the rest and returns when everything is done."""
        if self.plan.fallback_names:
            model.load_weights([(name, self._imported.gathered(name)) for name in self.plan.fallback_names])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.no_grad()
    def sums(self, *, read_back: bool) -> np.ndarray:
        """Checksums of `held`; for fallback tensors, which the engine transformed, of what it was given.

        read_back: of the parameters' current memory. A plan's first sync always does this, since the copies' own checksums cannot reveal
        wrong addresses in the plan. Raises WeightsCorrupt naming a parameter whose constant rows differ.
        """
        copies = self._copies
        if read_back or not self._is_proven:
            copies = self.recorded.checksums
            copies.start()
        self._is_proven = True
        if self.plan.constants:
            self.recorded.fill_checksums.start()
            for index in (self.recorded.fill_checksums.sums() != self.recorded.fill_sums).nonzero()[0].tolist():
                constant = self.plan.constants[index]
                raise WeightsCorrupt(
                    f"{constant.parameter}: rows that must be {constant.value} are not", tensors=constant.parameter
                )
        sums = copies.sums()
        gathered = [checksum(self._imported.gathered(name), source) for name, source in self.held[len(sums) :]]
        return np.concatenate([sums, np.array(gathered, dtype=np.uint64)])


def _strided(tensor: torch.Tensor, at: Slice) -> torch.Tensor:
    return tensor.as_strided(at.shape, at.strides, tensor.storage_offset() + at.offset)


def _refuse_packed(model: EngineModel) -> None:
    if isinstance(model, torch.nn.Module):
        for name, module in model.named_modules():
            if getattr(module, "use_intel_amx_backend", False):
                raise UnsupportedModel(
                    f"the weights of {name} are packed for AMX, which a copy plan cannot express", module=name
                )
