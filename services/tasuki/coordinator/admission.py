"""Admits a stage only if its devices have room for the memory it takes, by what both services report just before it.

On a GPU the free memory is the driver's. On a CPU it is the machine's available memory, limited by what the tags of both services
leave of `memory.host_budget_bytes`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasuki.config.engine_arguments import MAX_TOKENS
from tasuki.config.schema import NodeConfig
from tasuki.coordinator.memory_record import TAKES, MemoryRecord, Usages, tags_of
from tasuki.memory.host import host_memory
from tasuki.planner.choose import plan_node
from tasuki.planner.kv_tokens import TOKENS_KEY
from tasuki.planner.node import GB, MARGIN, Part
from tasuki.planner.plan import needed_bytes
from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.wire.errors import OutOfGpuMemory, TasukiError
from tasuki.wire.stages import RULES, MemoryTag, Service, Stage

if TYPE_CHECKING:
    from tasuki.coordinator.changeover import Peers

_log = logging.getLogger("tasuki.coordinator")
_MOST_DEVICES = 4


@dataclass(frozen=True, slots=True)
class _Shortage:
    """One device that lacks room for a stage. `held`: holder -> bytes."""

    device: str
    needed_bytes: int
    free_bytes: int
    margin_bytes: int
    held: Mapping[str, int]

    @property
    def short_bytes(self) -> int:
        return self.needed_bytes + self.margin_bytes - self.free_bytes


class Admission:
    """Compares what a stage takes with what is free. One per coordinator."""

    def __init__(
        self,
        peers: "Peers",
        config: NodeConfig,
        *,
        published_bytes: Callable[[str], int | None],
        record: MemoryRecord | None = None,
    ) -> None:
        """published_bytes: bytes that the trainer with this boot id published last, from the journal; None if it never published.

        record: receives the usage that both services report.
        """
        self._peers, self._config, self._published_bytes, self._record = peers, config, published_bytes, record
        self._sizes: dict[str, int] = {}

    async def admit(self, stage: Stage, *, trainer_boot_id: str) -> None:
        """Raises OutOfGpuMemory, with numbers and advice, if `stage` has no room.

        A service that does not report its memory is no reason to refuse: its arenas refuse, or the stage fails by itself.
        """
        if stage not in TAKES:
            return
        # Counting what torch caches takes milliseconds, and matters only if the rest does not suffice.
        usages = await self._read(stage, skip_torch_cache=True)
        if usages is None or not await self._lacks(stage, usages, trainer_boot_id=trainer_boot_id):
            return
        usages = await self._read(stage)
        if usages is not None and (shortages := await self._lacks(stage, usages, trainer_boot_id=trainer_boot_id)):
            woken = MemoryTag.all_of(one.tag for one in tags_of(stage, usages[RULES[stage].service], TAKES))
            raise _refusal(stage, shortages, tags=list(dict.fromkeys(woken)) or [MemoryTag.EXPORT], config=self._config)

    async def gpu_bytes(self) -> int:
        """Memory of the smallest device, read once. Raises TasukiError if it is unknown and rollout does not report it."""
        if not self._sizes:
            self._note_sizes(await self._peers.usage(Service.ROLLOUT))
        return min(self._sizes.values())

    def _note_sizes(self, usage: GetUsageResponse) -> None:
        self._sizes |= {one.device: one.total_bytes for one in usage.devices}

    async def _read(self, stage: Stage, *, skip_torch_cache: bool = False) -> Usages | None:
        """Usage of both services; None unless both answer."""
        calls = (self._peers.usage(service, skip_torch_cache=skip_torch_cache) for service in Service)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        usages: dict[Service, GetUsageResponse] = {}
        for service, answer in zip(Service, answers, strict=True):
            if isinstance(answer, GetUsageResponse):
                usages[service] = answer
                self._note_sizes(answer)
            elif not isinstance(answer, TasukiError):
                raise answer
        if len(usages) < len(Service):
            _log.warning("event=admission_skipped stage=%s answered=%s", stage, ",".join(usages) or "-")
            return None
        if self._record is not None:
            self._record.note(usages)
        return usages

    async def _lacks(self, stage: Stage, usages: Usages, *, trainer_boot_id: str) -> list[_Shortage]:
        """Measured devices without enough room for `stage`, or for what the trainer's first publication makes.

        What torch caches in the service that runs `stage` counts as free: its arenas empty this cache when they lack memory.
        """
        usage = usages[RULES[stage].service]
        is_made = any(one.tag == MemoryTag.EXPORT.number for one in usages[Service.TRAINER].tags)
        if stage is Stage.LOAD_WEIGHTS and not is_made and self._published_bytes(trainer_boot_id) is None:
            needed = await self._first_export()
        else:
            needed = Counter[str]()
            for one in tags_of(stage, usage, TAKES):
                needed[one.device] += max(0, one.total_bytes - one.mapped_bytes - one.kept_bytes)
        free = self._free(usages)
        for one in usage.devices:
            if one.device in free:
                free[one.device] += one.torch_cached_bytes
        shortages: list[_Shortage] = []
        for device, size in needed.items():
            margin = 0 if device == "cpu" else MARGIN
            if size > 0 and device in free and size + margin > free[device]:
                shortages.append(_Shortage(device, size, free[device], margin, _holders(device, usages)))
        return shortages

    def _free(self, usages: Usages) -> dict[str, int]:
        """Bytes free by device."""
        if self._config.device == "cpu":
            available, budget = host_memory().available_bytes, self._config.memory.host_budget_bytes
            held = sum(one.mapped_bytes + one.kept_bytes for usage in usages.values() for one in usage.tags)
            return {"cpu": available if budget is None else min(available, max(0, budget - held))}
        free: dict[str, int] = {}
        for one in (one for usage in usages.values() for one in usage.devices):
            # Ranks on one device read at different moments: take the lowest.
            free[one.device] = min(one.free_bytes, free.get(one.device, one.free_bytes))
        return free

    async def _first_export(self) -> dict[str, int]:
        """Planned bytes by device of the arena that the first publication creates; empty if the planner fails."""
        try:
            planned = await asyncio.to_thread(
                plan_node, self._config, gpu_bytes=await self.gpu_bytes(), host_bytes=host_memory().total_bytes
            )
        except TasukiError as error:
            _log.warning("event=admission_skipped stage=%s reason=%s", Stage.LOAD_WEIGHTS, error.message)
            return {}
        need = needed_bytes(planned, Stage.LOAD_WEIGHTS, has_published=False)
        sizes = [parts.get(Part.EXPORT, 0) for parts in need.gpus]
        return {"cpu": sum(sizes)} if self._config.device == "cpu" else {f"cuda:{i}": size for i, size in enumerate(sizes)}


def _holders(device: str, usages: Usages) -> dict[str, int]:
    """Bytes by holder of the device's memory, largest first. "others" are processes outside this node's ranks."""
    held: Counter[str] = Counter()
    for service, usage in usages.items():
        for one in usage.tags:
            if one.device == device:
                held[f"{service} {MemoryTag.of(one.tag)}"] += one.mapped_bytes + one.kept_bytes
    ranks = [one for usage in usages.values() for one in usage.devices if one.device == device]
    if device != "cpu" and ranks:
        used = ranks[0].total_bytes - min(one.free_bytes for one in ranks)
        processes = sum(one.process_bytes for one in ranks)
        held["contexts and caches of this node"] = max(0, processes - held.total())
        held["others"] = max(0, used - processes)
    return {who: size for who, size in held.most_common() if size}


def _refusal(stage: Stage, shortages: list[_Shortage], *, tags: Sequence[str], config: NodeConfig) -> OutOfGpuMemory:
    """Error of a stage that was not begun. tags: those that do not fit."""
    shortages = sorted(shortages, key=lambda shortage: -shortage.short_bytes)
    worst = shortages[0]
    lines = [
        f"{shortage.device}: {_gb(shortage.needed_bytes)} needed, {_gb(shortage.free_bytes)} free, {_gb(shortage.short_bytes)} short"
        for shortage in shortages[:_MOST_DEVICES]
    ]
    if len(shortages) > _MOST_DEVICES:
        lines.append(f"{len(shortages) - _MOST_DEVICES} more devices")
    held = ", ".join(f"{who} {_gb(size)}" for who, size in worst.held.items()) or "nobody of this node"
    advice = _advice(stage, worst, config)
    return OutOfGpuMemory(
        f"{stage} was not begun, there is no room for {', '.join(tags)}: {'; '.join(lines)}. Held on {worst.device}: {held}. {advice}",
        stage=stage,
        tag=",".join(tags),
        **{name: getattr(worst, name) for name in ("device", "needed_bytes", "free_bytes", "short_bytes", "margin_bytes")},
        held="; ".join(f"{who}={size}" for who, size in worst.held.items()),
        advice=advice,
    )


def _advice(stage: Stage, shortage: _Shortage, config: NodeConfig) -> str:
    """Advice on what to change, simplest first."""
    changes: list[str] = []
    budget, is_cpu = config.memory.host_budget_bytes, shortage.device == "cpu"
    if is_cpu and budget is not None:
        changes.append(f"raise memory.host_budget_bytes to {budget + shortage.short_bytes} if the machine has that much")
    elif is_cpu or shortage.held.get("others", 0) >= shortage.short_bytes:
        changes.append(f"end other programs that hold memory of {shortage.device}")
    if stage is Stage.RESUME_KV:
        tokens, fitting_bytes = config.rollout.engine.get(MAX_TOKENS), shortage.needed_bytes - shortage.short_bytes
        if isinstance(tokens, int) and fitting_bytes > 0:
            changes.append(f"lower {TOKENS_KEY} to {tokens * fitting_bytes // shortage.needed_bytes} or less")
        else:
            changes.append(f"lower {TOKENS_KEY}" if is_cpu else f"lower rollout.kv_ratio or {TOKENS_KEY}")
    elif stage is Stage.RESUME_WEIGHTS and not is_cpu:
        changes.append("spread the engine over more ranks (rollout.tp_size), or the trainer (trainer.num_ranks)")
    elif not is_cpu:
        changes.append("spread the trainer over more ranks (trainer.num_ranks)")
    return f"Try again when there is room, or {', or '.join(changes)}; `tasuki plan` says what fits."


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= GB / 10 else f"{num_bytes / 10**6:.1f} MB"
