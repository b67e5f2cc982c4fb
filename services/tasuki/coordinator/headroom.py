"""Room for a stage: bytes it takes on each device, bytes free there, the holders of the rest, and advice. Pure.

On a GPU `free` is the driver's free memory. On a CPU it is the machine's available memory, limited by what the tags of both services
leave of `memory.host_budget_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tasuki.config.engine_arguments import MAX_TOKENS
from tasuki.config.schema import NodeConfig
from tasuki.planner.kv_tokens import TOKENS_KEY
from tasuki.planner.node import GB, MARGIN
from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.v1.types_pb2 import TagUsage
from tasuki.wire.errors import OutOfGpuMemory
from tasuki.wire.stages import RING, MemoryTag, Service, Stage

TAKES = {rule.stage: rule.resumes for rule in RING if rule.resumes}
"""Tags that a stage wakes."""
_GIVES = {rule.stage: rule.pauses for rule in RING if rule.pauses}
_MOST_DEVICES = 4

Bytes = Mapping[str, int]
"""Bytes per device."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """One device that lacks room for a stage. `held`: holder -> bytes."""

    device: str
    needed_bytes: int
    free_bytes: int
    margin_bytes: int
    held: Mapping[str, int]

    @property
    def short_bytes(self) -> int:
        return max(0, self.needed_bytes + self.margin_bytes - self.free_bytes)


def taken_by(stage: Stage, usage: GetUsageResponse) -> Bytes:
    """Bytes by device that the tags of `stage` take when they resume, beyond mapped and kept memory."""
    return _sums((one.device, max(0, one.total_bytes - one.mapped_bytes - one.kept_bytes)) for one in _of(stage, usage, TAKES))


def after(stage: Stage, usage: GetUsageResponse) -> GetUsageResponse:
    """The same usage once `stage` is done."""
    wakes, sleeps = _of(stage, usage, TAKES), _of(stage, usage, _GIVES)

    def moved(one: TagUsage) -> TagUsage:
        then = TagUsage()
        then.CopyFrom(one)
        if one in wakes:
            then.mapped_bytes, then.kept_bytes, then.is_paused = one.total_bytes, 0, False
        elif one in sleeps and not one.stays:
            then.mapped_bytes, then.is_paused = 0, True
        return then

    return GetUsageResponse(tags=[moved(one) for one in usage.tags], devices=usage.devices)


def free_of_gpus(usages: Iterable[GetUsageResponse]) -> dict[str, int]:
    """Bytes free by device, from services that have just reported."""
    free: dict[str, int] = {}
    for usage in usages:
        for one in usage.devices:
            # Ranks on one device read at different moments: take the lowest.
            free[one.device] = min(one.free_bytes, free.get(one.device, one.free_bytes))
    return free


def free_of_host(available_bytes: int, usages: Iterable[GetUsageResponse], *, budget_bytes: int | None) -> int:
    """Bytes available on the host, limited by what both services leave of the budget."""
    if budget_bytes is None:
        return available_bytes
    held = sum(one.mapped_bytes + one.kept_bytes for usage in usages for one in usage.tags)
    return min(available_bytes, max(0, budget_bytes - held))


def woken_by(stage: Stage, usage: GetUsageResponse) -> list[str]:
    """Tags that `stage` resumes in this service."""
    return list(dict.fromkeys(MemoryTag.all_of(one.tag for one in _of(stage, usage, TAKES))))


def cached_bytes(usage: GetUsageResponse) -> Bytes:
    """Bytes by device that torch caches in the service's processes; its arenas empty this cache when they lack memory."""
    return _sums((one.device, one.torch_cached_bytes) for one in usage.devices)


def holders(device: str, usages: Mapping[Service, GetUsageResponse]) -> dict[str, int]:
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


def margin_bytes(device: str) -> int:
    """Bytes that must stay free beyond a stage's need: on a GPU the margin of `tasuki plan`, on a CPU 0."""
    return 0 if device == "cpu" else MARGIN


def lacks_room(device: str, needed_bytes: int, free: Bytes) -> bool:
    """Whether a measured device is short of the memory that a stage takes there; False for devices not measured."""
    return needed_bytes > 0 and device in free and needed_bytes + margin_bytes(device) > free[device]


def refusal(stage: Stage, shortages: list[Shortage], *, tags: Sequence[str], config: NodeConfig) -> OutOfGpuMemory:
    """Error of a stage that was not begun. shortages: devices that lack room. tags: those that do not fit."""
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
        device=worst.device,
        needed_bytes=worst.needed_bytes,
        free_bytes=worst.free_bytes,
        short_bytes=worst.short_bytes,
        margin_bytes=worst.margin_bytes,
        held="; ".join(f"{who}={size}" for who, size in worst.held.items()),
        advice=advice,
    )


def _advice(stage: Stage, shortage: Shortage, config: NodeConfig) -> str:
    """Advice on what to change, simplest first."""
    changes: list[str] = []
    budget = config.memory.host_budget_bytes
    if shortage.device == "cpu" and budget is not None:
        changes.append(f"raise memory.host_budget_bytes to {budget + shortage.short_bytes} if the machine has that much")
    elif shortage.device == "cpu" or shortage.held.get("others", 0) >= shortage.short_bytes:
        changes.append(f"end other programs that hold memory of {shortage.device}")
    match stage:
        case Stage.RESUME_KV:
            changes.append(f"lower {_smaller_cache(shortage, config)}")
        case _ if shortage.device == "cpu":
            pass
        case Stage.RESUME_WEIGHTS:
            changes.append("spread the engine over more ranks (rollout.tp_size), or the trainer (trainer.num_ranks)")
        case _:
            changes.append("spread the trainer over more ranks (trainer.num_ranks)")
    return f"Try again when there is room, or {', or '.join(changes)}; `tasuki plan` says what fits."


def _smaller_cache(shortage: Shortage, config: NodeConfig) -> str:
    tokens = config.rollout.engine.get(MAX_TOKENS)
    if not isinstance(tokens, int) or shortage.needed_bytes <= shortage.short_bytes:
        return TOKENS_KEY if shortage.device == "cpu" else f"rollout.kv_ratio or {TOKENS_KEY}"
    fits = tokens * (shortage.needed_bytes - shortage.short_bytes) // shortage.needed_bytes
    return f"{TOKENS_KEY} to {fits} or less"


def _of(stage: Stage, usage: GetUsageResponse, tags: Mapping[Stage, Sequence[MemoryTag]]) -> list[TagUsage]:
    return [one for one in usage.tags if MemoryTag.of(one.tag) in tags.get(stage, ())]


def _sums(sizes: Iterable[tuple[str, int]]) -> Bytes:
    total: dict[str, int] = {}
    for device, size in sizes:
        total[device] = total.get(device, 0) + size
    return {device: size for device, size in total.items() if size}


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= GB / 10 else f"{num_bytes / 10**6:.1f} MB"
