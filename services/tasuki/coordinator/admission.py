"""Admits a stage only if its devices have room for the memory it takes.

GPUs are measured once a changeover, by the service that is idle meanwhile: rollout during LOAD_WEIGHTS, the trainer during DRAIN.
After that, free memory is estimated from the bytes that each stage gives and takes. The estimate ignores what torch releases in
OFFLOAD, so it is never too high. If it is unknown or too low for a stage, the stage's own service is measured. Host memory is read before
each stage on a CPU. A service's tags are read once in its life, and again when a stage moved an unexpected number of bytes. A stage is
refused only on numbers that both services have just reported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from tasuki.config.places import room_signal_path
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
    without_cache,
    woken_by,
)
from tasuki.coordinator.memory_record import MemoryRecord
from tasuki.coordinator.records import Outcome
from tasuki.memory.host import host_memory
from tasuki.memory.pool import pool_bytes
from tasuki.memory.room_signal import RoomSignal
from tasuki.memory.stages import RULES, Service, Stage
from tasuki.memory.tags import MemoryTag, ServiceUsage
from tasuki.planner.layout import Part
from tasuki.planner.node_plan import plan_node
from tasuki.planner.plan import needed_bytes
from tasuki.wire.errors import TasukiError

_LEAVING_POLL_S = 0.02
_IDLE_DURING = {Stage.LOAD_WEIGHTS: Service.ROLLOUT, Stage.DRAIN: Service.TRAINER}
"""Service that is measured while the stage runs."""
_log = logging.getLogger("tasuki.coordinator")


def may_wait_between(stage: Stage, following: Stage | None) -> bool:
    """Whether a service may be asked for its memory after the answer of `stage` and before `following`, if another stage follows."""
    return stage in _IDLE_DURING or following in TAKES


class MemoryReader(Protocol):
    """Reads the memory usage of both services."""

    async def usage(self, service: Service, *, skip_torch_cache: bool = False) -> ServiceUsage:
        """Memory usage of one service. Raises TasukiError if it is busy or does not answer."""
        ...


class Admission:
    """Tracks the memory of both services. One per coordinator."""

    def __init__(
        self,
        memory: MemoryReader,
        config: NodeConfig,
        *,
        published_bytes: Callable[[str], int | None],
        record: MemoryRecord | None = None,
    ) -> None:
        """published_bytes: bytes that the trainer with this boot id published last, from the journal; None if it never published.

        record: receives the usage that both services report.
        """
        self._memory, self._config, self._published_bytes, self._record = memory, config, published_bytes, record
        self._boots: Mapping[Service, str] = {}
        self._usages: dict[Service, ServiceUsage] = {}
        self._free: dict[str, int] | None = None
        self._has_published = False
        self._is_measured = False
        self._sizes: dict[str, int] = {}

    def meet(self, boots: Mapping[Service, str]) -> None:
        """Adopts the services' boot ids, and forgets all readings if one has changed."""
        if boots == self._boots:
            return
        self.forget()
        self._boots = dict(boots)
        self._has_published = self._published_bytes(boots[Service.TRAINER]) is not None

    def forget(self) -> None:
        """Discards all readings: memory moved outside the stages."""
        self._usages, self._free, self._is_measured = {}, None, False

    async def admit(self, stage: Stage) -> None:
        """Raises OutOfGpuMemory, with numbers and advice, if `stage` has no room.

        A service that does not report its memory is no reason to refuse: its arenas refuse, or the stage fails by itself.
        """
        is_first = stage is Stage.LOAD_WEIGHTS and not self._has_published
        if stage in (Stage.LOAD_WEIGHTS, Stage.DRAIN):
            self._free = None  # measured in an earlier changeover
        if stage not in TAKES:
            return
        self._look_at_host()
        if not is_first and self._has_room(stage):
            return
        is_brief = self._config.device != "cpu" and not is_first
        if is_brief and (not await self._measure_briefly(stage) or self._has_room(stage)):
            return
        if not await self._measure_all(stage):
            return
        if stage is Stage.RESUME_KV:
            await self._await_release(stage)
        is_made = any(one.tag is MemoryTag.EXPORT for one in self._usages[Service.TRAINER].tags)
        needed = await self._first_export() if is_first and not is_made else self._taken(stage)
        if needed and (shortages := self._shortages(stage, needed)):
            tags = woken_by(stage, self._usages[RULES[stage].service]) or [MemoryTag.EXPORT]
            raise refusal(stage, shortages, tags=tags, config=self._config)

    @asynccontextmanager
    async def during(self, stage: Stage) -> AsyncIterator[None]:
        """Admits `stage`, and measures the idle service while the stage runs. Raises as `admit`."""
        await self.admit(stage)
        asked = () if self._is_measured else self._idle_during(stage)
        self._is_measured = False
        # DRAIN usually finds no requests and waits for the reading. The trainer has emptied its cache, or keeps it.
        reading = asyncio.create_task(self._read(asked, skip_torch_cache=stage is Stage.DRAIN)) if asked else None
        try:
            yield
            if reading is not None:
                self._take(await reading)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])

    async def _await_release(self, stage: Stage) -> None:
        """Asks the trainer to release its state and waits until `stage` has room, at most `restart.progress_s`."""
        clock, signal = asyncio.get_running_loop(), RoomSignal(room_signal_path(self._config.state_dir))
        ends = clock.time() + self._config.restart.progress_s
        while any(one.is_leaving for one in self._usages[Service.TRAINER].tags) and self._shortages(
            stage, self._taken(stage) or {}
        ):
            signal.request()
            await asyncio.sleep(_LEAVING_POLL_S)
            if clock.time() >= ends or not await self._measure_all(stage):
                return

    def done(self, stage: Stage, outcome: Outcome) -> None:
        """Updates the estimate with the bytes that a stage took or gave."""
        service = RULES[stage].service
        usage = self._usages.get(service)
        if stage is Stage.LOAD_WEIGHTS and not self._has_published:
            self._has_published = True
            self._doubt(service)  # it may have created an arena
        elif usage is not None:
            given, taken = given_by(stage, usage), taken_by(stage, usage)
            self._move_free(given)
            self._move_free({device: -size for device, size in taken.items()})
            self._usages[service] = after(stage, usage)
            # LOAD_WEIGHTS reports published bytes, not moved ones; DRAIN and SYNC move none.
            is_moving = bool(given or taken) and stage is not Stage.LOAD_WEIGHTS
            if is_moving and sum(given.values()) + sum(taken.values()) != outcome.num_bytes:
                self._doubt(service)  # its tags have grown, or other tags moved
            if any(one.is_leaving for one in self._usages.get(service, usage).tags):
                self._usages.pop(service, None)  # its pages leave gradually: ask again

    def _doubt(self, service: Service) -> None:
        """Discards the readings of a service and the estimate of free memory."""
        self._usages.pop(service, None)
        self._free = None

    async def gpu_bytes(self) -> int:
        """Memory of the smallest device, read once. Raises TasukiError if it is unknown and rollout does not report it."""
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
            return (_IDLE_DURING[stage],) if stage in _IDLE_DURING else ()
        # The trainer may have grown while it trained, by a reference policy, which only the budget can notice. It answers after the stage.
        has_budget = self._config.memory.host_budget_bytes is not None
        return (Service.TRAINER,) if has_budget and stage is Stage.LOAD_WEIGHTS else ()

    def _taken(self, stage: Stage) -> Bytes | None:
        """Bytes that `stage` takes by device; None if unknown."""
        usage = self._usages.get(RULES[stage].service)
        return None if usage is None else taken_by(stage, usage)

    def _has_room(self, stage: Stage) -> bool:
        """Whether the known free memory suffices on every device."""
        needed, free = self._taken(stage), self._free_for(stage)
        if needed is None or not needed.keys() <= free.keys():
            return False
        return not any(lacks_room(device, size, free) for device, size in needed.items())

    def _shortages(self, stage: Stage, needed: Bytes) -> list[Shortage]:
        """Measured devices without enough room."""
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
        """Free memory by device, including the cached blocks of torch in the service that runs `stage`."""
        usage = self._usages.get(RULES[stage].service)
        cached = {} if usage is None else cached_bytes(usage)
        return {device: size + cached.get(device, 0) for device, size in (self._free or {}).items()}

    async def _measure_briefly(self, stage: Stage) -> bool:
        """Measures the devices of the service that runs `stage`. Returns whether it answered.

        Counting what torch caches takes milliseconds. It is needed only if the rest does not suffice; so is the other service.
        """
        return await self._measure(stage, (RULES[stage].service,), skip_torch_cache=True)

    async def _measure_all(self, stage: Stage) -> bool:
        """Measures both services. Returns whether both answered."""
        return await self._measure(stage, tuple(Service))

    async def _measure(self, stage: Stage, services: Sequence[Service], *, skip_torch_cache: bool = False) -> bool:
        readings = await self._read(services, skip_torch_cache=skip_torch_cache)
        self._take(readings)
        self._is_measured = len(readings) == len(services)
        if not self._is_measured:
            _log.warning("event=admission_skipped stage=%s answered=%s", stage, ",".join(readings) or "-")
        return self._is_measured

    async def _read(self, services: Sequence[Service], *, skip_torch_cache: bool = False) -> dict[Service, ServiceUsage]:
        """Usage of the services that answer."""
        calls = (self._memory.usage(service, skip_torch_cache=skip_torch_cache) for service in services)
        answers = await asyncio.gather(*calls, return_exceptions=True)
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
            # What another service had cached may have been returned, and then counts as free.
            others = {service: without_cache(usage) for service, usage in self._usages.items() if service not in readings}
            self._usages |= others
        self._look_at_host()

    def _look_at_host(self) -> None:
        """Computes the free memory of a CPU node once both services have reported."""
        if self._config.device == "cpu" and len(self._usages) == len(Service):
            available, budget = host_memory().available_bytes, self._config.memory.host_budget_bytes
            if self._config.memory.pool and budget is not None:
                # The pool has already taken the budget from the machine.
                available = budget = pool_bytes(budget)
            self._free = {"cpu": free_of_host(available, self._usages.values(), budget_bytes=budget)}

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
