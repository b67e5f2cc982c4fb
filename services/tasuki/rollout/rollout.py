"""State of the rollout service and the effect of each stage."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasuki.rollout.generate import (
    EngineRequest,
    Sample,
    check_request,
    given_sampling,
    has_exact_log_probs,
    log_prob_temperature,
    question,
    sampling_of,
)
from tasuki.rollout.rank_calls import RankCalls
from tasuki.rollout.seeds import CallNumbers, sample_seed
from tasuki.rollout.sync import SyncReport, WeightSync
from tasuki.rpc.commands import REFUSALS
from tasuki.v1 import weights_pb2
from tasuki.v1.rollout_pb2 import GenerateRequest
from tasuki.wire.errors import (
    Asleep,
    DeadlineExceeded,
    Draining,
    EnginePoisoned,
    InternalError,
    OutOfGpuMemory,
    PolicyDiverged,
    TasukiError,
    VersionOrder,
)
from tasuki.wire.stages import START, MemoryTag, Stage

if TYPE_CHECKING:
    from tasuki.rollout.engine import RolloutEngine

from tasuki.wire.errors import Busy, StageOrder
from tasuki.wire.stages import RULES, Rpc, Service, allowed_after


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


def check_idle(stage: Stage, *, num_running: int) -> None:
    """Raises Busy if running requests would lose their memory."""
    if RULES[stage].rpc is Rpc.PAUSE and num_running:
        raise Busy(f"{num_running} requests run; drain before {stage}", stage=stage, num_running=num_running)


def is_serving(after: Stage | None) -> bool:
    return after is Stage.RESUME_KV


_log = logging.getLogger(__name__)
_CUT_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Drained:
    """How the samples ended that were running when a drain began."""

    num_finished: int
    num_cut: int


class Rollout:
    """One engine, the version of its weights, its memory, and the service's place in the ring.

    calls, seed: for the seeds of samples whose request gives none. on_serving: called when generation opens or closes. on_poison: called
    when the engine's memory can no longer be trusted.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        sync: WeightSync,
        ranks: RankCalls,
        *,
        calls: CallNumbers,
        seed: int,
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
        self._calls, self._rollout_seed = calls, seed
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

    async def resume(self, stage: Stage, tags: list[MemoryTag], *, timeout_s: float) -> int:
        """Runs RESUME_WEIGHTS or RESUME_KV; the latter commits the received version and serves it. Returns the bytes mapped.

        Raises OutOfGpuMemory with everything unchanged.
        """
        check_stage(stage, after=self.stage, poison_reason=self.poison_reason)
        with self._poisoning(stage, unless=OutOfGpuMemory):
            mapped = await self.ranks.resume(tags, timeout_s=timeout_s)
        self.stage = stage
        if is_serving(stage):
            self._highest_served = self._held_version
            self._calls.begin_version(self._held_version)
            await self._open()
        _log.info("event=stage stage=%s mapped_bytes=%d policy_version=%s", stage, mapped, self._held_version)
        return mapped

    async def pause(self, stage: Stage, tags: list[MemoryTag], *, timeout_s: float) -> int:
        """Runs PAUSE_KV, which evicts cached prefixes, or PAUSE_WEIGHTS, after which no version is held. Returns the bytes released."""
        check_stage(stage, after=self.stage, poison_reason=self.poison_reason)
        if self.poison_reason is None:
            check_idle(stage, num_running=self.num_running)
        await self._close()
        with self._poisoning(stage):
            released = await self.ranks.pause(tags, timeout_s=timeout_s)
        if stage is Stage.PAUSE_WEIGHTS:
            self._held_version = None
        self.stage = stage
        _log.info("event=stage stage=%s released_bytes=%d", stage, released)
        return released

    async def receive(self, weights: weights_pb2.PublishedWeights, *, timeout_s: float) -> SyncReport:
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
            " ".join(f"{name}_s={seconds:.4f}" for name, seconds in report.timings.items()),
        )
        return report

    async def drain(self, *, grace_s: float, timeout_s: float) -> Drained:
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
                await self.engine.become_idle(timeout_s=_CUT_AGAIN_S)
        self.stage = Stage.DRAIN
        drained = Drained(self.engine.num_finished - finished, self.engine.num_cut - cut)
        _log.info("event=stage stage=DRAIN finished=%d cut=%d", drained.num_finished, drained.num_cut)
        return drained

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Sample]]:
        """Yields samples in order of completion; those that ended together come together.

        Raises EnginePoisoned, Draining or Asleep if no version is served.
        """
        check_request(request, self.engine.model)
        self._check_open()
        call, version = uuid.uuid4().hex, self._held_version
        assert version is not None

        # SGLang aborts by prefix: the separators keep this call from aborting another, and sample 1 from aborting sample 10.
        prefix = f"{call}-"
        num_requests = len(request.prompts) * request.num_samples
        requests = self._engine_requests(request, prefix=prefix, seed=self._seed(request, call=call))
        sampling = given_sampling(request)
        temperature, is_exact = log_prob_temperature(sampling), has_exact_log_probs(sampling)
        async with aclosing(self.engine.generate(requests, num_requests=num_requests, prefix=prefix)) as completions:
            async for ended in completions:
                if not all(math.isfinite(log_prob) for _, completion in ended for log_prob in completion.log_probs):
                    raise PolicyDiverged(
                        f"policy version {version} yields log-probs that are not finite; load a checkpoint",
                        policy_version=version,
                    )
                yield [
                    Sample(*divmod(index, request.num_samples), completion, version, temperature, is_exact)
                    for index, completion in ended
                ]

    def _engine_requests(self, request: GenerateRequest, *, prefix: str, seed: int | str | None) -> Iterator[EngineRequest]:
        """Created lazily: a call may have very many. seed: see `_seed`."""
        given = given_sampling(request)
        for prompt, token_ids in enumerate([list(prompt.token_ids) for prompt in request.prompts]):
            for sample in range(request.num_samples):
                sampling = sampling_of(given, self.engine.model, num_prompt_tokens=len(token_ids))
                if seed is not None:
                    sampling["sampling_seed"] = sample_seed(seed, prompt=request.first_prompt + prompt, sample=sample)
                yield EngineRequest(f"{prefix}{prompt}-{sample}.", token_ids, sampling)

    def _seed(self, request: GenerateRequest, *, call: str) -> int | str | None:
        """Base of the samples' seeds; None if the engine does not use seeds.

        Without a caller's seed it depends on the version, the call's content, and how often that was asked before. A restarted engine
        repeats the lost samples, and asking twice gives different samples.
        """
        if not self.engine.model.is_seeded:
            return None
        if request.sampling_params.HasField("sampling_seed"):
            return request.sampling_params.sampling_seed
        asked = question(request)
        number = self._calls.number(asked, call_id=request.request_id or call)
        return f"{self._rollout_seed}/{self._held_version}/{asked}/{number}"

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
