"""State of the rollout service, each stage's effect on its engine ranks, and the gRPC interface to their memory."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasuki.rollout.generate import check_request, generate, prepared_images
from tasuki.rollout.rank import rank_address
from tasuki.rollout.seeds import CallSeeds
from tasuki.rollout.sync import WeightSync
from tasuki.rpc.commands import REFUSALS, CommandGate, remaining_s
from tasuki.rpc.memory import UsageServicer, decode_move, joined
from tasuki.rpc.ranks import RankFront
from tasuki.v1 import memory_pb2, ranks_pb2, types_pb2, weights_pb2
from tasuki.v1.memory_pb2 import PauseRequest, PauseResponse, ResumeRequest, ResumeResponse
from tasuki.v1.rollout_pb2 import DrainResponse, GenerateRequest, ReceiveWeightsResponse
from tasuki.wire.errors import (
    Asleep,
    Busy,
    DeadlineExceeded,
    Draining,
    EnginePoisoned,
    InternalError,
    OutOfGpuMemory,
    StageOrder,
    TasukiError,
    VersionOrder,
    from_reason,
)
from tasuki.wire.stages import RULES, START, MemoryTag, Rpc, Service, Stage, allowed_after

if TYPE_CHECKING:
    from tasuki.rollout.sglang.engine import RolloutEngine

_log = logging.getLogger(__name__)
_CUT_AGAIN_S = 0.05
_IDLE_TIMEOUT_S = 5.0
_IDLE_POLL_S = 0.005
_CONNECT_POLL_S = 0.005


class RankCalls(RankFront[ranks_pb2.EngineRankCommand, ranks_pb2.EngineRankResult]):
    """Calls the ranks of all replicas. They run a command while their scheduler waits for requests.

    Their memory is awake when the engine has started. Pause and resume are idempotent and all-or-nothing.

    Every call raises DeadlineExceeded when not all ranks have answered in time. A call that was given up goes on in the ranks: the
    next one waits for its end.
    """

    def __init__(self, num_ranks: int, *, socket_dir: Path, staying: frozenset[MemoryTag] = frozenset()) -> None:
        """staying: tags that the ranks do not release."""
        self._staying = staying
        self._awake = {MemoryTag.WEIGHTS, MemoryTag.KV_CACHE}
        super().__init__(rank_address(socket_dir), ranks_pb2.EngineRankResult, service="engine", num_ranks=num_ranks)

    @property
    def resident_tags(self) -> list[MemoryTag]:
        """Tags that are mapped on every rank."""
        return [tag for tag in (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE) if tag in self._awake]

    async def _send(self, commands: Sequence[ranks_pb2.EngineRankCommand]) -> None:
        while not self.is_connected:  # noqa: ASYNC110 - ranks that have just started are heard of by no event
            await asyncio.sleep(_CONNECT_POLL_S)
        await super()._send(commands)

    async def receive(self, receive: ranks_pb2.ReceiveCommand, *, timeout_s: float) -> list[ranks_pb2.ReceiveResult]:
        """Copies the published weights on every rank. After any error the engine's weights are unknown.

        No request may be running.
        """
        results = await self.call(ranks_pb2.EngineRankCommand(receive=receive), timeout_s=timeout_s)
        return [result.receive for result in results]

    async def pause(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> int:
        """Gives the pages of `tags` back, cached prefixes with them. Returns the bytes released over all ranks.

        Raises Busy when requests still run after 5 seconds.
        """
        command = ranks_pb2.EngineRankCommand(pause=PauseRequest(tags=[tag.number for tag in tags]))
        patience = asyncio.get_running_loop().time() + min(timeout_s, _IDLE_TIMEOUT_S)
        while True:
            try:
                results = await self.call(command, timeout_s=timeout_s)
                break
            except Busy:
                # The scheduler may take a moment to notice that its last request has ended. The tags of some ranks may sleep by then.
                if asyncio.get_running_loop().time() > patience:
                    raise
                await asyncio.sleep(_IDLE_POLL_S)
        self._awake -= set(tags) - self._staying
        return sum(result.pause.released_bytes for result in results)

    async def resume(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> int:
        """Takes pages for `tags` at the same addresses, on all ranks. Returns the bytes mapped over all ranks.

        Raises OutOfGpuMemory when a rank has no room; then what slept before sleeps on every rank. After any other error the memory's
        state is unknown.
        """
        command = ranks_pb2.EngineRankCommand(resume=ResumeRequest(tags=[tag.number for tag in tags]))
        try:
            results = await self.call(command, timeout_s=timeout_s)
        except OutOfGpuMemory:
            await self.pause([tag for tag in tags if tag not in self._awake], timeout_s=timeout_s)
            raise
        self._awake |= set(tags)
        return sum(result.resume.mapped_bytes for result in results)

    async def usage(self, request: memory_pb2.GetUsageRequest, timeout_s: float) -> memory_pb2.GetUsageResponse:
        """Memory usage as every rank reports it. Raises DeadlineExceeded when they are busy for longer."""
        command = ranks_pb2.EngineRankCommand(get_usage=request)
        return joined([result.get_usage for result in await self.call(command, timeout_s=timeout_s)])

    async def load(self, *, timeout_s: float) -> list[ranks_pb2.LoadResult]:
        """Load of every rank's scheduler."""
        command = ranks_pb2.EngineRankCommand(get_load=ranks_pb2.GetLoadCommand())
        return [result.get_load for result in await self.call(command, timeout_s=timeout_s)]

    async def _raise_errors(self, results: Sequence[ranks_pb2.EngineRankResult]) -> None:
        """Raises what a rank reported; a mere lack of memory, which has changed nothing, only when no rank has worse to say."""
        errors = [_error_of(result) for result in results if result.HasField("error")]
        for error in sorted(errors, key=lambda error: isinstance(error, OutOfGpuMemory)):
            raise error


def _error_of(result: ranks_pb2.EngineRankResult) -> TasukiError:
    message = f"engine rank {result.rank}: {result.error.message}"
    if not result.error.reason:
        return InternalError(message)
    return from_reason(result.error.reason, message, {**result.error.metadata, "rank": str(result.rank)})


def check_stage(stage: Stage, *, after: Stage | None, poison_reason: str | None) -> None:
    """Raises StageOrder, or EnginePoisoned, unless `stage` may follow `after`.

    A poisoned engine may only release its memory, so that the trainer can continue.
    """
    accepted = allowed_after(Service.ROLLOUT, after)
    if poison_reason is not None:
        if RULES[stage].rpc is not Rpc.PAUSE:
            raise EnginePoisoned(f"the engine must be restarted: {poison_reason}", stage=stage)
    elif stage not in accepted:
        place, allowed = after or START, ", ".join(accepted)
        raise StageOrder(f"stage {stage} cannot follow {place}; allowed: {allowed}", stage=stage, after=place, allowed=allowed)


class Rollout:
    """One engine, the version of its weights, its memory, and the service's place in the ring.

    on_serving: called when generation opens or closes. on_poison: called when the engine's memory can no longer be trusted.
    """

    def __init__(
        self,
        engine: "RolloutEngine",
        sync: WeightSync,
        ranks: RankCalls,
        *,
        seeds: CallSeeds,
        on_serving: Callable[[bool], Awaitable[None]],
        on_poison: Callable[[], None],
    ) -> None:
        self.boot_id = uuid.uuid4().hex
        self.engine = engine
        self.stage: Stage | None = None
        self.poison_reason: str | None = None
        self.ranks = ranks
        self._sync = sync
        self._on_serving, self._on_poison = on_serving, on_poison
        self._seeds = seeds
        self._held_version: int | None = None
        self._highest_served: int | None = None
        self._is_open = False

    @property
    def policy_version(self) -> int | None:
        """The version being served, also while its last samples drain."""
        return self._held_version if self.stage in (Stage.RESUME_KV, Stage.DRAIN) else None

    @property
    def received_version(self) -> int | None:
        """The version resident and verified but not served."""
        return None if self.policy_version is not None else self._held_version

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    async def fall_asleep(self, *, timeout_s: float) -> None:
        """Pauses all memory once the engine is up: the trainer gets it first."""
        released = await self.ranks.pause([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS], timeout_s=timeout_s)
        await self._on_serving(False)
        _log.info("event=asleep released_bytes=%d", released)

    async def resume(self, stage: Stage, tags: list[MemoryTag], *, timeout_s: float) -> ResumeResponse:
        """Runs RESUME_WEIGHTS or RESUME_KV; the latter commits the received version and serves it.

        Raises OutOfGpuMemory with everything unchanged.
        """
        check_stage(stage, after=self.stage, poison_reason=self.poison_reason)
        with self._poisoning(stage, unless=OutOfGpuMemory):
            mapped = await self.ranks.resume(tags, timeout_s=timeout_s)
        self.stage = stage
        if stage is Stage.RESUME_KV:
            self._highest_served = self._held_version
            await self._open()
        _log.info("event=stage stage=%s mapped_bytes=%d policy_version=%s", stage, mapped, self._held_version)
        return ResumeResponse(mapped_bytes=mapped)

    async def pause(self, stage: Stage, tags: list[MemoryTag], *, timeout_s: float) -> PauseResponse:
        """Runs PAUSE_KV, which evicts cached prefixes, or PAUSE_WEIGHTS, after which no version is held."""
        check_stage(stage, after=self.stage, poison_reason=self.poison_reason)
        if self.poison_reason is None and self.num_running:
            text = f"{self.num_running} requests run; drain before {stage}"
            raise Busy(text, stage=stage, num_running=self.num_running)
        await self._close()
        with self._poisoning(stage):
            released = await self.ranks.pause(tags, timeout_s=timeout_s)
        if stage is Stage.PAUSE_WEIGHTS:
            self._held_version = None
        self.stage = stage
        _log.info("event=stage stage=%s released_bytes=%d", stage, released)
        return PauseResponse(released_bytes=released)

    async def receive(self, weights: weights_pb2.PublishedWeights, *, timeout_s: float) -> ReceiveWeightsResponse:
        """Runs SYNC. A refusal before any write changes nothing; any other failure poisons the engine."""
        check_stage(Stage.SYNC, after=self.stage, poison_reason=self.poison_reason)
        if self._highest_served is not None and weights.policy_version < self._highest_served:
            raise VersionOrder(
                f"policy version {weights.policy_version} is older than {self._highest_served}, which was served",
                want=weights.policy_version,
                have=self._highest_served,
            )
        started = time.perf_counter()
        imported = await self._sync.prepare(weights)
        with self._poisoning(Stage.SYNC):
            report = await self._sync.run(weights, imported, timeout_s=timeout_s)
        self._held_version = report.policy_version
        self.stage = Stage.SYNC
        _log.info(
            "event=stage stage=SYNC policy_version=%d copied_bytes=%d fallbacks=%d seconds=%.3f %s",
            report.policy_version,
            report.copied_bytes,
            len(report.fallback_names),
            time.perf_counter() - started,
            " ".join(f"{timing.name}_s={timing.seconds:.4f}" for timing in report.timings),
        )
        return report

    async def drain(self, *, grace_s: float, timeout_s: float) -> DrainResponse:
        """Runs DRAIN: refuses new requests, lets running samples finish for `grace_s`, then cuts the rest.

        If the engine does not release them within `timeout_s`, raises DeadlineExceeded and poisons the engine.
        """
        check_stage(Stage.DRAIN, after=self.stage, poison_reason=self.poison_reason)
        await self._close()
        finished, cut = self.engine.num_finished, self.engine.num_cut
        started = time.monotonic()
        with self._poisoning(Stage.DRAIN):
            while self.num_running:
                seconds = time.monotonic() - started
                if seconds >= timeout_s:
                    raise DeadlineExceeded(f"the engine did not release {self.num_running} requests", stage=Stage.DRAIN)
                if seconds >= grace_s:
                    # Repeated, since a sample may still be on its way to the engine.
                    self.engine.cut_all()
                else:
                    self.engine.cut_continued()
                await self.engine.become_idle(timeout_s=_CUT_AGAIN_S)
        self.stage = Stage.DRAIN
        drained = DrainResponse(num_finished=self.engine.num_finished - finished, num_cut=self.engine.num_cut - cut)
        _log.info("event=stage stage=DRAIN finished=%d cut=%d", drained.num_finished, drained.num_cut)
        return drained

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[types_pb2.Sample], None]:
        """Samples in order of completion; those that ended together come together.

        Raises EnginePoisoned, Draining or Asleep if no version is served.
        """
        model = self.engine.model
        check_request(request, model)
        self._check_open()
        # Decoded beside the event loop: another version may be served after that, or none.
        if images := await prepared_images(request, model):
            self._check_open()
        version = self._held_version
        assert version is not None
        seed = self._seeds.of(request, version=version) if model.is_seeded else None
        async with aclosing(generate(self.engine, request, images=images, policy_version=version, seed=seed)) as samples:
            async for ended in samples:
                yield ended

    def _check_open(self) -> None:
        if self.poison_reason is not None:
            raise EnginePoisoned(f"the engine must be restarted: {self.poison_reason}")
        if not self._is_open:
            if self.stage in (Stage.RESUME_KV, Stage.DRAIN):
                raise Draining("rollout is draining; acquire phase ROLLOUT again")
            raise Asleep(f"rollout serves no version now (last stage {self.stage or START}); acquire phase ROLLOUT")

    async def _open(self) -> None:
        self._is_open = True
        await self._on_serving(True)

    async def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            await self._on_serving(False)

    def _poison(self, stage: Stage, error: BaseException) -> None:
        self.poison_reason = f"{stage} failed: {type(error).__name__}: {error}"
        self._held_version = None
        _log.error("event=poisoned reason=%s", self.poison_reason)
        self._on_poison()

    @contextmanager
    def _poisoning(self, stage: Stage, *, unless: type[TasukiError] | tuple[()] = ()) -> Iterator[None]:
        """Poisons the engine if the block fails halfway: its memory can no longer be trusted. `unless`: refusals that changed nothing.

        Raises InternalError if only some ranks refuse: the others may have continued, while a refusal means that none has.
        """
        try:
            yield
        except unless:
            raise
        except BaseException as error:
            self._poison(stage, error)
            if isinstance(error, TasukiError) and error.code in REFUSALS:
                text = f"{stage} failed half-way, and the engine is restarted: {error.message}"
                raise InternalError(text, **error.metadata) from error
            raise


class RolloutMemoryServicer(UsageServicer):
    """gRPC interface to the engine's memory, moved by stages."""

    def __init__(self, rollout: Rollout, gate: CommandGate) -> None:
        super().__init__(rollout.ranks.usage)
        self._rollout, self._gate = rollout, gate

    async def Pause(self, request: PauseRequest, context: Any) -> PauseResponse:
        stage, tags = decode_move(request, Service.ROLLOUT)
        return await self._gate.stage(request, partial(self._rollout.pause, stage, tags, timeout_s=remaining_s(context)))

    async def Resume(self, request: ResumeRequest, context: Any) -> ResumeResponse:
        stage, tags = decode_move(request, Service.ROLLOUT)
        return await self._gate.stage(request, partial(self._rollout.resume, stage, tags, timeout_s=remaining_s(context)))
