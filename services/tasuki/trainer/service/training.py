"""Effects of the trainer's commands on its ranks and state. All are called with the turn held and the trainer loaded."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.aggregation import denominator
from tasuki.algorithms.loss_types import LossConfig
from tasuki.models.routes import Routes, RouteShape
from tasuki.trainer.data import checks
from tasuki.trainer.data.cost import SampleCost
from tasuki.trainer.data.micro_batch import unpacked_routes
from tasuki.trainer.data.plan import MicroBatchPlan, Sharing, plan_shared
from tasuki.trainer.data.samples import Samples, starts
from tasuki.trainer.ranks import TrainerRanks
from tasuki.trainer.service.requests import check_learning_rate, check_route_bytes, decode_role, decode_samples
from tasuki.trainer.service.state import TrainerState, roles_by_name
from tasuki.trainer.wire import (
    ROLE_MESSAGES,
    ROLES,
    Role,
    decode_loss,
    decode_scores,
    encode_parts,
    merge_metrics,
    merge_parts,
)
from tasuki.v1 import loss_pb2, ranks_pb2, trainer_pb2
from tasuki.v1.trainer_pb2 import RoleState
from tasuki.v1.types_pb2 import Role as RoleMessage
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.v1.weights_pb2 import LoadedCheckpoint
from tasuki.wire.errors import GradientsNotFinite, InvalidArgument, NoGradients

_LossCall = trainer_pb2.ForwardBackwardHeader | ranks_pb2.LoggedForwardBackward


class Training:
    """The ranks as one trainer."""

    def __init__(
        self,
        ranks: TrainerRanks,
        *,
        state: TrainerState,
        limits: checks.BatchLimits,
        costs: Mapping[Role, SampleCost],
        ranks_per_micro_batch: int = 1,
        sharing: Sharing = Sharing.NEVER,
    ) -> None:
        """costs: of a sample under every role that is trained or scored. ranks_per_micro_batch: that share each. sharing: of prompts
        between samples.
        """
        self.ranks, self.state = ranks, state
        self._limits, self._costs, self._num_sharing, self._sharing = limits, costs, ranks_per_micro_batch, sharing
        self._divided_alone: set[Role] = set()
        """Roles whose pending gradients were divided by the count of their own call."""
        self._losses: dict[Role, dict[LossConfig, _Parts]] = {}
        """The different losses whose gradients are pending."""

    @property
    def micro_batch_tokens(self) -> int:
        return self._limits.micro_batch_tokens

    async def begin_run(self, request: trainer_pb2.BeginRunRequest) -> trainer_pb2.BeginRunResponse:
        """Raises GradientsPending."""
        self.state.check_no_gradients("BeginRun")
        answers = await self.ranks.call(ranks_pb2.TrainerRankCommand(begin_run=request))
        for state in self.state.roles.values():
            state.schedule_start = state.version
        return answers[0].begin_run

    def decode_forward_backward(self, call: _LossCall, samples: Sequence[TrainingSample]) -> tuple[Role, LossConfig, Samples]:
        """Decodes the samples and checks them.

        Raises InvalidArgument naming sample and field, also for a call without denominator that adds to another's gradients;
        VersionOrder for a version that does not exist yet.
        """
        trained = self._trained(call.role, field="header.role")
        config = decode_loss(call.loss)
        decoded = decode_samples(samples, routes=self._routes(trained, samples), images=self._limits.images)
        if trained is Role.POLICY:
            checks.check_routed(decoded, config=config, limits=self._limits)
        if self.state.roles[trained].has_gradients and (_divides_alone(call) or trained in self._divided_alone):
            problem = (
                f"is missing in a call of this step of the {trained}: each would divide by its own count, and their sum be too large; "
                "give each one the count of all (`step_samples` of the SDK, also beside a loss in Python), or call DiscardGradients"
            )
            raise InvalidArgument("header.loss.settings.denominator", problem)
        pending = self._losses.get(trained, {}) if self.state.roles[trained].has_gradients else {}
        pending.get(config, _Parts()).and_of(call, samples)
        for earlier in pending:
            divided = {name: getattr(earlier, name) for name in ("aggregation", "aggregation_length", "denominator")}
            if config != earlier == replace(config, **divided):
                problem = (
                    f"is {config.denominator:g} with {config.aggregation}, in an earlier call of this step {earlier.denominator:g} with "
                    f"{earlier.aggregation}; give every call the count of all (`step_samples`: all samples of the step)"
                )
                raise InvalidArgument("header.loss.settings.denominator", problem)
        if call.is_share:
            checks.check_share(decoded, config=config, role=trained, limits=self._limits)
        else:
            checks.check_sequences(decoded, limits=self._limits)
            checks.check_loss(decoded, config=config, role=trained)
        if self._limits.has_aux_loss and trained is Role.POLICY:
            checks.check_denominator(decoded, config=config)
        checks.check_versions(decoded, policy_version=self.state.policy_version)
        return trained, config, decoded

    def decode_scored(
        self, role: RoleMessage.ValueType, samples: Sequence[TrainingSample], *, is_old_policy: bool = False
    ) -> tuple[Role, Samples, RouteShape | None]:
        """Decodes samples to score with the policy, the reference or the critic, and the routes to return. Raises InvalidArgument."""
        is_reference = role == ROLE_MESSAGES[Role.REFERENCE]
        if is_reference and self._limits.starts_from_adapter:
            problem = "the reference would be the model without trainer.lora.path, which starts the policy"
            raise InvalidArgument("header.role", f"{problem}; merge the adapter into the model with PEFT to score with it")
        scored = Role.REFERENCE if is_reference else self._trained(role, field="header.role")
        routes = self._routes(scored, samples)
        returned = routes if is_old_policy and self._limits.replays_old_policy else None
        # Scoring ignores fields of losses.
        given = routes if returned is None else None
        decoded = decode_samples(samples, names=(), routes=given, images=self._limits.images)
        checks.check_sequences(decoded, limits=self._limits)
        if returned is not None:
            check_route_bytes(2 * returned.width * len(decoded.token_ids_T))
        return scored, decoded, returned

    async def forward_backward(
        self,
        role: Role,
        call: _LossCall,
        config: LossConfig,
        samples: Samples,
        *,
        log_probs_of: Sequence[int] = (),
    ) -> trainer_pb2.ForwardBackwardResponse:
        """Takes the call of decode_forward_backward with its result. log_probs_of: checked by `check_log_probs_of`."""
        started = time.perf_counter()
        mask_N = samples.columns["loss_mask"]
        divisor = config.denominator or denominator(mask_N, samples.num_completion_S, config=config)
        named = _with_denominator(call.loss, divisor)
        losses = self._losses.setdefault(role, {})
        if not self.state.roles[role].has_gradients:
            losses.clear()
        if not _divides_alone(call):
            losses[config] = losses.get(config, _Parts()).and_of(call, samples)
        (self._divided_alone.add if _divides_alone(call) else self._divided_alone.discard)(role)
        samples, plan = self._plan(role, samples)
        answers = await self.ranks.call(
            [
                ranks_pb2.TrainerRankCommand(
                    forward_backward=ranks_pb2.RankForwardBackward(
                        role=ROLE_MESSAGES[role],
                        loss=named,
                        micro_batches=encode_parts(samples, parts),
                        returns_log_probs=bool(log_probs_of),
                    )
                )
                for parts in self._for_each_rank(plan)
            ]
        )
        self.state.roles[role].has_gradients = True
        # Ranks that share micro-batches report the same.
        parts = [answer.forward_backward for answer in answers[:: self._num_sharing]]
        metric_parts = merge_parts([part.metrics for part in parts])
        return trainer_pb2.ForwardBackwardResponse(
            loss=sum(part.loss for part in parts),
            num_samples=len(samples),
            num_tokens=int(mask_N.sum()),
            denominator=divisor,
            metrics=merge_metrics(metric_parts),
            metric_parts=metric_parts,
            num_micro_batches=sum(bool(micro_batch) for micro_batches in plan for micro_batch in micro_batches),
            seconds=time.perf_counter() - started,
            log_probs=[
                trainer_pb2.TokenLogProbs(log_probs=row)
                for row in _rows_of(log_probs_of, plan, [part.log_probs for part in parts], samples=samples)
            ],
        )

    def role_state(self, role: RoleMessage.ValueType) -> RoleState:
        """Raises InvalidArgument unless this node trains the role."""
        return self.state.roles[self._trained(role, field="role")]

    def check_optim_step(self, request: trainer_pb2.OptimStepRequest, *, is_repeat: bool = False) -> RoleState:
        """The role's state. Raises InvalidArgument and, unless the step may be done already, NoGradients."""
        check_learning_rate(request)
        state = self.role_state(request.role)
        if not (state.has_gradients or is_repeat):
            raise NoGradients("there are no gradients: call ForwardBackward first")
        losses = self._losses.get(ROLES[request.role], {})
        if state.has_gradients and (missing := sum(parts.missing or 0 for parts in losses.values())):
            problem = f"has {missing} samples more than came: send the other parts before the step, or call DiscardGradients"
            raise InvalidArgument("step_samples", problem)
        return state

    async def optim_step(self, request: trainer_pb2.OptimStepRequest) -> trainer_pb2.OptimStepResponse:
        """Raises as check_optim_step, GradientsNotFinite with the gradients cleared, and PeerUnavailable if another node is lost."""
        state = self.check_optim_step(request)
        try:
            answers = await self.ranks.call(ranks_pb2.TrainerRankCommand(optim_step=request))
        except GradientsNotFinite:
            state.has_gradients = False
            raise
        state.has_gradients, state.version = False, answers[0].optim_step.version
        return answers[0].optim_step

    async def discard_gradients(self, request: trainer_pb2.DiscardGradientsRequest) -> trainer_pb2.DiscardGradientsResponse:
        state = self.role_state(request.role)
        await self.ranks.call(ranks_pb2.TrainerRankCommand(discard_gradients=request))
        state.has_gradients = False
        return trainer_pb2.DiscardGradientsResponse()

    async def load_checkpoint(self, request: trainer_pb2.LoadCheckpointRequest) -> trainer_pb2.LoadCheckpointResponse:
        """Clears the gradients. Raises the errors of checkpoint.load_checkpoint."""
        answers = await self.ranks.call(ranks_pb2.TrainerRankCommand(load_checkpoint=request))
        loaded = answers[0].load_checkpoint
        self.state.roles = roles_by_name(loaded.roles)
        self.state.loaded = LoadedCheckpoint(path=request.path, policy_version=loaded.policy_version)
        return loaded

    async def score(
        self, role: Role, samples: Samples, returned: RouteShape | None = None
    ) -> tuple[list[NDArray[np.float32]], list[Routes]]:
        """Computes log-probs or values, [tokens of the completion] for each sample, in order, and the routes to return."""
        samples, plan = self._plan(role, samples)
        width = None if returned is None else returned.width
        commands = [
            ranks_pb2.RankScore(role=ROLE_MESSAGES[role], micro_batches=encode_parts(samples, parts), route_width=width)
            for parts in self._for_each_rank(plan)
        ]
        answers = await self.ranks.call([ranks_pb2.TrainerRankCommand(score=command) for command in commands])
        scores, num = [answer.score for answer in answers], self._num_sharing
        rows = _rows_of(range(len(samples)), plan, [score.micro_batches for score in scores[::num]], samples=samples)
        if returned is None:
            return rows, []
        sharing = [
            zip(*(score.routes for score in scores[rank : rank + num]), strict=True) for rank in range(0, len(scores), num)
        ]
        return rows, await asyncio.to_thread(_routes_of, returned, plan, sharing, samples=samples)

    def _trained(self, role: RoleMessage.ValueType, *, field: str) -> Role:
        """Raises InvalidArgument unless this node trains the role."""
        if role == ROLE_MESSAGES[Role.CRITIC] and Role.CRITIC not in self.state.roles:
            raise InvalidArgument(field, "this node has no critic; add a table [trainer.critic]")
        return decode_role(role, allowed=list(self.state.roles), field=field)

    def _routes(self, role: Role, samples: Sequence[TrainingSample]) -> RouteShape | None:
        """The routes that the role replays. Raises InvalidArgument for samples with any that this node does not replay."""
        if self._limits.routes is None:
            for index, sample in enumerate(samples):
                if sample.routed_experts:
                    problem = "has experts, but this node does not replay them (trainer.router_replay, for models with experts)"
                    raise InvalidArgument(f"samples[{index}].routed_experts", problem)
        return self._limits.routes if role is Role.POLICY else None

    def _plan(self, role: Role, samples: Samples) -> tuple[Samples, MicroBatchPlan]:
        if not len(samples):
            return samples, [[] for _ in range(self.ranks.num_ranks // self._num_sharing)]
        return plan_shared(
            samples,
            num_ranks=self.ranks.num_ranks // self._num_sharing,
            max_tokens=self._limits.micro_batch_tokens,
            cost=self._costs[role],
            sharing=self._sharing,
        )

    def _for_each_rank(self, plan: MicroBatchPlan) -> MicroBatchPlan:
        return [micro_batches for micro_batches in plan for _ in range(self._num_sharing)]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What came of a step's samples for one loss. missing: those to come; None if no call has said how many the step has."""

    missing: int | None = None
    places: frozenset[int] = frozenset()

    def and_of(self, call: _LossCall, samples: Sized) -> "_Parts":
        """With the samples of `call`. Raises InvalidArgument for a sample too many or one that came before."""
        if not call.HasField("step_samples"):
            return self
        num_samples = call.call_samples or len(samples)
        missing = (call.step_samples if self.missing is None else self.missing) - num_samples
        if missing < 0:
            problem = f"is {call.step_samples}, but the step's calls have {-missing} samples more: call DiscardGradients, send each once"
            raise InvalidArgument("header.step_samples", problem)
        places = self.places.union(call.step_places)
        if call.step_places and (len(call.step_places) != num_samples or max(call.step_places) >= call.step_samples):
            problem = f"needs one place below {call.step_samples} for each of the call's {num_samples} samples"
            raise InvalidArgument("header.step_places", problem)
        if call.step_places and len(places) < len(self.places) + num_samples:
            problem = "has a sample of the step that came before: send each once, or call DiscardGradients and send all anew"
            raise InvalidArgument("header.step_places", problem)
        return _Parts(missing, places)


def _divides_alone(call: _LossCall) -> bool:
    return call.is_own_denominator or "denominator" not in call.loss.settings


def _with_denominator(loss: loss_pb2.LossConfig, denominator: float) -> loss_pb2.LossConfig:
    """The loss as ranks get it: none of them sees all samples, so each divides by the denominator of the whole call."""
    named = loss_pb2.LossConfig()
    named.CopyFrom(loss)
    named.settings["denominator"] = denominator
    return named


def _rows_of(
    positions: Sequence[int], plan: MicroBatchPlan, contents: Sequence[Sequence[bytes]], *, samples: Samples
) -> list[NDArray[np.float32]]:
    """Scores of the samples at these positions, one for all tokens of an image. contents: of each rank's micro-batches."""
    if not positions:
        return []
    asked = set(positions)
    scored: dict[int, NDArray[np.float32]] = {}
    for micro_batches, scores in zip(plan, contents, strict=True):
        for indices, content in zip(micro_batches, scores, strict=True):
            wanted = [place for place, index in enumerate(indices) if index in asked]
            rows = decode_scores(content, num_tokens_S=samples.num_completion_S[indices], wanted=wanted)
            scored.update(zip((indices[place] for place in wanted), rows, strict=True))
    if samples.images is None:
        return [scored[position] for position in positions]
    named = np.split(~samples.is_image_N(first=1), np.cumsum(samples.num_completion_S)[:-1])
    return [scored[position][named[position]] for position in positions]


def _routes_of(
    shape: RouteShape, plan: MicroBatchPlan, contents: Sequence[Iterable[Sequence[bytes]]], *, samples: Samples
) -> list[Routes]:
    """Routes of each sample's tokens but the last. contents: of each rank's micro-batches, the parts of the ranks that share it."""
    found: dict[int, Routes] = {}
    for micro_batches, parts in zip(plan, contents, strict=True):
        for indices, content in zip(micro_batches, parts, strict=True):
            chosen = samples.select(indices)
            packed_TR = np.frombuffer(b"".join(content), np.int16).reshape(-1, shape.width)
            routes_TR = unpacked_routes(chosen, packed_TR).clip(min=0).astype(shape.dtype)
            firsts = starts(chosen.num_tokens_S).tolist()
            for index, first, num in zip(indices, firsts, (chosen.num_tokens_S - 1).tolist(), strict=True):
                found[index] = routes_TR[first : first + num]
    return [found[position] for position in range(len(samples))]
