"""Lets a stage begin only where there is room for what it takes.

GPUs are measured once a changeover, by the service that has nothing else to do meanwhile: rollout during LOAD_WEIGHTS, the trainer
during DRAIN. From there on their free memory is reckoned, by what the stages give and take; that leaves out what torch gives back with
OFFLOAD, so it is never more than there is. A CPU's memory is looked at before each stage. What the tags of a service hold is asked for
once in its life, and again when a stage moved other bytes than expected. A stage is refused only by numbers that both services have
just given.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from tasuki.config.places import room_request_path
from tasuki.config.schema import NodeConfig
from tasuki.coordinator.headroom import (
    TAKES,
    Bytes,
    Shortage,
    after,
    cached_bytes,
    free_of_gpus,
    free_of_host,
    given_by,
    holders,
    lacks_room,
    margin_bytes,
    refusal,
    taken_by,
    woken_by,
)
from tasuki.coordinator.memory_record import MemoryRecord
from tasuki.coordinator.records import Outcome
from tasuki.memory.host import host_memory
from tasuki.memory.pool import pool_bytes
from tasuki.memory.room_request import RoomRequest
from tasuki.memory.stages import RULES, Service, Stage
from tasuki.memory.tags import MemoryTag, ServiceUsage
from tasuki.planner.layout import Part
from tasuki.planner.node_plan import plan_node
from tasuki.planner.plan import needed_bytes
from tasuki.wire.errors import TasukiError

_LEAVING_POLL_S = 0.02
_log = logging.getLogger("tasuki.coordinator")


class MemoryReader(Protocol):
    """What the admission asks of the services."""

    async def usage(self, service: Service) -> ServiceUsage:
        """Raises TasukiError when it does not answer, or is busy."""
        ...


class Admission:
    """What is known of both services' memory. One for each coordinator."""

    def __init__(
        self,
        memory: MemoryReader,
        config: NodeConfig,
        *,
        published_bytes: Callable[[str], int | None],
        record: MemoryRecord | None = None,
    ) -> None:
        """published_bytes: what the trainer of this boot id published last, of the journal; None when it has not.

        record: gets what both services say.
        """
        self._memory, self._config, self._published_bytes, self._record = memory, config, published_bytes, record
        self._boots: Mapping[Service, str] = {}
        self._usages: dict[Service, ServiceUsage] = {}
        self._free: dict[str, int] | None = None
        self._has_published = False
        self._is_measured = False
        self._sizes: dict[str, int] = {}

    def meet(self, boots: Mapping[Service, str]) -> None:
        """Takes the services' boot ids. What one that is gone had said is forgotten."""
        if boots == self._boots:
            return
        self.forget()
        self._boots = dict(boots)
        self._has_published = self._published_bytes(boots[Service.TRAINER]) is not None

    def forget(self) -> None:
        """The services' memory has been moved by other ways than the stages'."""
        self._usages, self._free, self._is_measured = {}, None, False

    async def admit(self, stage: Stage) -> None:
        """Raises OutOfGpuMemory, with numbers and advice, when `stage` has no room.

        A service that does not say what it holds is no reason to refuse: its own arenas do that, or the stage meets what ails it.
        """
        is_first = stage is Stage.LOAD_WEIGHTS and not self._has_published
        if stage in (Stage.LOAD_WEIGHTS, Stage.DRAIN):
            self._free = None  # what is known is of the changeover before
        if stage not in TAKES:
            return
        self._look_at_host()
        needed = self._taken(stage)
        if not is_first and needed is not None and self._has_room(stage, needed):
            return
        if not await self._measure_all(stage):
            return
        if stage is Stage.RESUME_KV:
            await self._let_leave(stage)
        is_made = any(one.tag is MemoryTag.EXPORT for one in self._usages[Service.TRAINER].tags)
        needed = await self._first_export() if is_first and not is_made else self._taken(stage)
        if needed and (shortages := self._shortages(stage, needed)):
            tags = woken_by(stage, self._usages[RULES[stage].service]) or [MemoryTag.EXPORT]
            raise refusal(stage, shortages, tags=tags, config=self._config)

    @asynccontextmanager
    async def during(self, stage: Stage) -> AsyncIterator[None]:
        """Admits `stage`, and measures while it runs on the other service. Raises as `admit`."""
        await self.admit(stage)
        asked = () if self._is_measured else self._idle_during(stage)
        self._is_measured = False
        reading = asyncio.create_task(self._read(asked)) if asked else None
        try:
            yield
            if reading is not None:
                self._take(await reading)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])

    async def _let_leave(self, stage: Stage) -> None:
        """Asks the trainer's state to leave, and waits, as long as `stage` has no room: at most the time of a stalled node."""
        clock = asyncio.get_running_loop()
        ends = clock.time() + self._config.restart.progress_s
        while any(one.is_leaving for one in self._usages[Service.TRAINER].tags) and self._shortages(
            stage, self._taken(stage) or {}
        ):
            RoomRequest(room_request_path(self._config.state_dir)).make()
            await asyncio.sleep(_LEAVING_POLL_S)
            if clock.time() >= ends or not await self._measure_all(stage):
                return

    def done(self, stage: Stage, outcome: Outcome) -> None:
        """Reckons with what a stage has taken or given."""
        service = RULES[stage].service
        usage = self._usages.get(service)
        if stage is Stage.LOAD_WEIGHTS and not self._has_published:
            self._has_published = True
            self._doubt(service)  # it may have made an arena
        elif usage is not None:
            given, taken = given_by(stage, usage), taken_by(stage, usage)
            self._move_free(given)
            self._move_free({device: -size for device, size in taken.items()})
            self._usages[service] = after(stage, usage)
            # Published bytes are another thing; DRAIN and SYNC move none.
            is_moving = bool(given or taken) and stage is not Stage.LOAD_WEIGHTS
            if is_moving and sum(given.values()) + sum(taken.values()) != outcome.num_bytes:
                self._doubt(service)  # its tags have grown, or others of them moved
            if any(one.is_leaving for one in self._usages.get(service, usage).tags):
                self._usages.pop(service, None)  # until it is asked again, what has left counts as little as what has not

    def _doubt(self, service: Service) -> None:
        """What is reckoned of its memory may be wrong."""
        self._usages.pop(service, None)
        self._free = None

    async def gpu_bytes(self) -> int:
        """Memory of the smallest device; remembered for good. Raises TasukiError when it is not known and nobody tells."""
        if not self._sizes:
            self._note_sizes(await self._memory.usage(Service.ROLLOUT))
        return min(self._sizes.values())

    def _note_sizes(self, usage: ServiceUsage) -> None:
        self._sizes |= {one.device: one.total_bytes for one in usage.devices}

    def _move_free(self, sizes: Bytes) -> None:
        if self._free is not None:
            for device in self._free.keys() & sizes.keys():
                self._free[device] += sizes[device]

    def _idle_during(self, stage: Stage) -> Sequence[Service]:
        if self._config.device == "cuda":
            return {Stage.LOAD_WEIGHTS: (Service.ROLLOUT,), Stage.DRAIN: (Service.TRAINER,)}.get(stage, ())
        # A trainer may have grown while it trained, by a reference policy, and a budget knows of nothing else. It answers behind the stage.
        has_budget = self._config.memory.host_budget_bytes is not None
        return (Service.TRAINER,) if has_budget and stage is Stage.LOAD_WEIGHTS else ()

    def _taken(self, stage: Stage) -> Bytes | None:
        """None while nobody knows."""
        usage = self._usages.get(RULES[stage].service)
        return None if usage is None else taken_by(stage, usage)

    def _has_room(self, stage: Stage, needed: Bytes) -> bool:
        """As far as is known."""
        free = self._free_for(stage)
        return needed.keys() <= free.keys() and not any(lacks_room(device, size, free) for device, size in needed.items())

    def _shortages(self, stage: Stage, needed: Bytes) -> list[Shortage]:
        """Measured devices that lack room."""
        free = self._free_for(stage)
        return [
            Shortage(
                device=device,
                needed_bytes=size,
                free_bytes=free[device],
                margin_bytes=margin_bytes(device),
                held=holders(device, self._usages),
            )
            for device, size in needed.items()
            if lacks_room(device, size, free)
        ]

    def _free_for(self, stage: Stage) -> Bytes:
        """With what torch only caches in the service that carries `stage` out."""
        usage = self._usages.get(RULES[stage].service)
        cached = {} if usage is None else cached_bytes(usage)
        return {device: size + cached.get(device, 0) for device, size in (self._free or {}).items()}

    async def _measure_all(self, stage: Stage) -> bool:
        """Whether both services have answered."""
        readings = await self._read(tuple(Service))
        self._take(readings)
        self._is_measured = len(readings) == len(Service)
        if not self._is_measured:
            _log.warning("event=admission_skipped stage=%s answered=%s", stage, ",".join(readings) or "-")
        return self._is_measured

    async def _read(self, services: Sequence[Service]) -> dict[Service, ServiceUsage]:
        """Of those that answer."""
        answers = await asyncio.gather(*(self._memory.usage(service) for service in services), return_exceptions=True)
        readings: dict[Service, ServiceUsage] = {}
        for service, answer in zip(services, answers, strict=True):
            if isinstance(answer, ServiceUsage):
                readings[service] = answer
            elif not isinstance(answer, TasukiError):
                raise answer
        return readings

    def _take(self, readings: Mapping[Service, ServiceUsage]) -> None:
        if not readings:
            return
        self._usages |= readings
        for usage in readings.values():
            self._note_sizes(usage)
        if self._record is not None and len(self._usages) == len(Service):
            self._record.note(self._usages)
        if self._config.device != "cpu":
            self._free = free_of_gpus(readings.values())
        self._look_at_host()

    def _look_at_host(self) -> None:
        """On a CPU free memory is known as soon as both services have told what they hold."""
        if self._config.device == "cpu" and len(self._usages) == len(Service):
            available, budget = host_memory().available_bytes, self._config.memory.host_budget_bytes
            if self._config.memory.pool and budget is not None:
                # The machine has given it already.
                available = budget = pool_bytes(budget)
            self._free = {"cpu": free_of_host(available, self._usages.values(), budget_bytes=budget)}

    async def _first_export(self) -> Bytes:
        """What the planner says of the arena that the trainer's first publication makes; nothing when it cannot say."""
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
