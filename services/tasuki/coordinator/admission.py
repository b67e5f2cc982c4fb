"""Admits a stage only if its devices have room for the memory it takes, by what both services report just before it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from tasuki.config.schema import NodeConfig
from tasuki.coordinator.changeover import Peers
from tasuki.coordinator.headroom import (
    TAKES,
    Bytes,
    Shortage,
    cached_bytes,
    free_of_gpus,
    free_of_host,
    holders,
    lacks_room,
    margin_bytes,
    refusal,
    taken_by,
    woken_by,
)
from tasuki.coordinator.observe.memory_record import MemoryRecord
from tasuki.memory.host import host_memory
from tasuki.planner.choose import plan_node
from tasuki.planner.node import Part
from tasuki.planner.plan import needed_bytes
from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.wire.errors import TasukiError
from tasuki.wire.stages import RULES, MemoryTag, Service, Stage

_log = logging.getLogger("tasuki.coordinator")
Usages = Mapping[Service, GetUsageResponse]


class Admission:
    """Compares what a stage takes with what is free. One per coordinator."""

    def __init__(
        self,
        peers: Peers,
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
            tags = woken_by(stage, usages[RULES[stage].service]) or [MemoryTag.EXPORT]
            raise refusal(stage, shortages, tags=tags, config=self._config)

    async def _lacks(self, stage: Stage, usages: Usages, *, trainer_boot_id: str) -> list[Shortage]:
        """Devices without enough room for `stage`, or for what the trainer's first publication makes."""
        is_made = any(one.tag == MemoryTag.EXPORT.number for one in usages[Service.TRAINER].tags)
        if stage is Stage.LOAD_WEIGHTS and not is_made and self._published_bytes(trainer_boot_id) is None:
            return self._shortages(stage, await self._first_export(), usages)
        return self._shortages(stage, taken_by(stage, usages[RULES[stage].service]), usages)

    async def gpu_bytes(self) -> int:
        """Memory of the smallest device, read once. Raises TasukiError if it is unknown and rollout does not report it."""
        if not self._sizes:
            self._note_sizes(await self._peers.usage(Service.ROLLOUT))
        return min(self._sizes.values())

    def _note_sizes(self, usage: GetUsageResponse) -> None:
        self._sizes |= {one.device: one.total_bytes for one in usage.devices}

    def _shortages(self, stage: Stage, needed: Bytes, usages: Usages) -> list[Shortage]:
        """Measured devices without enough room. What torch caches in the service that runs `stage` counts as free."""
        cached = cached_bytes(usages[RULES[stage].service])
        free = {device: size + cached.get(device, 0) for device, size in self._free(usages).items()}
        return [
            Shortage(
                device=device,
                needed_bytes=size,
                free_bytes=free[device],
                margin_bytes=margin_bytes(device),
                held=holders(device, usages),
            )
            for device, size in needed.items()
            if lacks_room(device, size, free)
        ]

    def _free(self, usages: Usages) -> Bytes:
        """Free memory by device."""
        if self._config.device != "cpu":
            return free_of_gpus(usages.values())
        available, budget = host_memory().available_bytes, self._config.memory.host_budget_bytes
        return {"cpu": free_of_host(available, usages.values(), budget_bytes=budget)}

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

    async def _first_export(self) -> Bytes:
        """Planned bytes of the arena that the first publication creates; empty if the planner fails."""
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
