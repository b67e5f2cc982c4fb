"""Memory behind fake services, as an admission measures it."""

import asyncio
from dataclasses import dataclass, field, replace

from tasuki.coordinator.journal import Intent, Outcome
from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.v1.types_pb2 import DeviceUsage, TagUsage
from tasuki.wire.errors import TasukiError
from tasuki.wire.stages import RULES, MemoryTag, Service, Stage
from tests.unit.fake_services import FakeServices

GB = 10**9


CONTEXT = GB // 10


PUBLISHED = 100  # of the fake trainer


@dataclass
class Devices:
    """Memory behind fake services: tags mapped while their service holds the device, and memory of other processes."""

    services: FakeServices
    device: str = "cuda:0"
    total_bytes: int = 12 * GB
    cache_bytes: int = 6 * GB
    copy_bytes: int = 0
    """Bytes of a published copy, mapped from LOAD_WEIGHTS to OFFLOAD."""
    foreign_bytes: int = 0
    torch_cached_bytes: int = 0
    rollout_cached_bytes: int = 0
    """Cached by torch in rollout, which counts as room for rollout's stages."""
    staying: frozenset[tuple[Service, MemoryTag]] = frozenset()
    """Tags that keep their pages, except when room is made for an engine."""
    silent: dict[Service, TasukiError] = field(default_factory=dict)
    asked: list[Service] = field(default_factory=list)

    def sizes(self, service: Service) -> dict[MemoryTag, int]:
        if service is Service.TRAINER:
            return {MemoryTag.WEIGHTS: 2 * GB, MemoryTag.GRADIENTS: 2 * GB, MemoryTag.OPTIMIZER: 4 * GB}
        return {MemoryTag.WEIGHTS: 1 * GB, MemoryTag.KV_CACHE: self.cache_bytes}

    def awake(self, service: Service) -> set[MemoryTag]:
        at = self.services.stage[service]
        staying = {tag for owner, tag in self.staying if owner is service}
        if service is Service.TRAINER:
            return staying if at is Stage.OFFLOAD else set(self.sizes(service))
        has_weights = at not in (None, Stage.PAUSE_WEIGHTS)
        tags = {MemoryTag.WEIGHTS} | staying if has_weights else staying
        return tags | ({MemoryTag.KV_CACHE} if at in (Stage.RESUME_KV, Stage.DRAIN) else set())

    def mapped(self, service: Service) -> int:
        return sum(self.sizes(service)[tag] for tag in self.awake(service))

    async def usage(self, service: Service, *, skip_torch_cache: bool = False) -> GetUsageResponse:
        self.asked.append(service)
        await asyncio.sleep(0)
        if service in self.silent:
            raise self.silent[service]
        processes = {each: self.mapped(each) + CONTEXT for each in Service}
        processes[Service.ROLLOUT] += self.rollout_cached_bytes
        processes[Service.TRAINER] += self.torch_cached_bytes if self.awake(Service.TRAINER) else 0
        free = self.total_bytes - sum(processes.values()) - self.foreign_bytes
        awake = self.awake(service)
        tags = tuple(
            TagUsage(
                tag=tag.number,
                device=self.device,
                mapped_bytes=size if tag in awake else 0,
                total_bytes=size,
                is_paused=tag not in awake,
                stays=(service, tag) in self.staying,
            )
            for tag, size in self.sizes(service).items()
        )
        if service is Service.TRAINER and self.copy_bytes:
            mapped = self.copy_bytes if self.services.stage[service] is Stage.LOAD_WEIGHTS else 0
            tag = MemoryTag.EXPORT.number
            export = TagUsage(
                tag=tag, device=self.device, mapped_bytes=mapped, total_bytes=self.copy_bytes, is_paused=not mapped
            )
            tags += (export,)
        others = self.total_bytes - free - processes[service]
        cached = self.rollout_cached_bytes if service is Service.ROLLOUT and not skip_torch_cache else 0
        device = DeviceUsage(
            device=self.device,
            total_bytes=self.total_bytes,
            free_bytes=free,
            process_bytes=processes[service],
            torch_cached_bytes=cached,
            other_processes_bytes=others,
        )
        return GetUsageResponse(tags=tags, devices=[device])


class SizedServices(FakeServices):
    """Fakes that report the bytes a stage moved."""

    devices: Devices

    async def carry_out(self, intent: Intent, *, published: bytes) -> Outcome:
        if intent.is_undo:
            return await super().carry_out(intent, published=published)
        service = RULES[intent.stage].service
        before = self.devices.mapped(service)
        outcome = await super().carry_out(intent, published=published)
        moved = abs(self.devices.mapped(service) - before)
        return replace(outcome, num_bytes=PUBLISHED if intent.stage is Stage.LOAD_WEIGHTS else moved)
