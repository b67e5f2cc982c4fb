"""What the trainer's commands do to its ranks and to its state; each is called with the turn held and the trainer loaded."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tasuki.config.schema import NodeConfig
from tasuki.trainer import batch
from tasuki.trainer.ranks.front import TrainerRanks
from tasuki.trainer.state import TrainerState
from tasuki.v1 import ranks_pb2, trainer_pb2
from tasuki.v1.trainer_pb2 import TrainingSamples
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import GradientsNotFinite, NoGradients


class Training:
    """The ranks as one trainer."""

    def __init__(self, ranks: TrainerRanks, *, state: TrainerState, ready: ranks_pb2.RankReady, config: NodeConfig) -> None:
        self.ranks, self.state = ranks, state
        self._limits = batch.BatchLimits(
            vocab_size=ready.vocab_size,
            context_length=ready.context_length,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
        )

    def check_loss_samples(self, samples: Sequence[TrainingSample], *, kl_coef: float) -> None:
        """Raises InvalidArgument naming sample and field, VersionOrder for a sample of a version that is not there yet."""
        batch.check_sequences(samples, limits=self._limits)
        batch.check_loss_fields(samples, kl_coef=kl_coef)
        batch.check_versions(samples, policy_version=self.state.policy_version)

    def check_sequences(self, samples: Sequence[TrainingSample]) -> None:
        """Raises InvalidArgument naming sample and field."""
        batch.check_sequences(samples, limits=self._limits)

    async def forward_backward(
        self, loss: trainer_pb2.LossConfig, samples: Sequence[TrainingSample]
    ) -> trainer_pb2.ForwardBackwardResponse:
        """loss: every field set. samples: checked."""
        started = time.perf_counter()
        num_loss_tokens = batch.count_loss_tokens(samples)
        num_gap_tokens = batch.count_gap_tokens(samples, policy_version=self.state.policy_version)
        plan = self._plan(samples)
        commands = [
            ranks_pb2.RankForwardBackward(
                loss=loss,
                micro_batches=_pick(samples, micro_batches),
                num_loss_tokens=num_loss_tokens,
                num_gap_tokens=num_gap_tokens,
            )
            for micro_batches in plan
        ]
        answers = await self.ranks.call_each([ranks_pb2.TrainerRankCommand(forward_backward=command) for command in commands])
        self.state.has_gradients = True
        parts = [answer.forward_backward for answer in answers]
        return trainer_pb2.ForwardBackwardResponse(
            loss=sum(part.loss for part in parts),
            num_samples=len(samples),
            num_tokens=num_loss_tokens,
            clip_fraction=sum(part.clip_fraction for part in parts),
            ref_kl=sum(part.ref_kl for part in parts),
            max_log_prob_gap=max(part.max_log_prob_gap for part in parts),
            mean_log_prob_gap=sum(part.mean_log_prob_gap for part in parts),
            num_gap_tokens=num_gap_tokens,
            entropy=sum(part.entropy for part in parts),
            num_micro_batches=sum(bool(micro_batch) for micro_batches in plan for micro_batch in micro_batches),
            seconds=time.perf_counter() - started,
        )

    async def optim_step(self, request: trainer_pb2.OptimStepRequest) -> trainer_pb2.OptimStepResponse:
        """Raises NoGradients, or GradientsNotFinite with the gradients cleared."""
        if not self.state.has_gradients:
            raise NoGradients("there are no gradients: call ForwardBackward first")
        try:
            answers = await self.ranks.call(ranks_pb2.TrainerRankCommand(optim_step=request))
        except GradientsNotFinite:
            self.state.has_gradients = False
            raise
        self.state.has_gradients = False
        self.state.policy_version = answers[0].optim_step.policy_version
        return answers[0].optim_step

    async def discard_gradients(self, request: trainer_pb2.DiscardGradientsRequest) -> trainer_pb2.DiscardGradientsResponse:
        await self.ranks.call(ranks_pb2.TrainerRankCommand(discard_gradients=request))
        self.state.has_gradients = False
        return trainer_pb2.DiscardGradientsResponse()

    async def load_checkpoint(self, request: trainer_pb2.LoadCheckpointRequest) -> trainer_pb2.LoadCheckpointResponse:
        """Clears the gradients. Raises what checkpoint.load_checkpoint raises."""
        answers = await self.ranks.call(ranks_pb2.TrainerRankCommand(load_checkpoint=request))
        self.state.has_gradients = False
        self.state.policy_version = answers[0].load_checkpoint.policy_version
        return answers[0].load_checkpoint

    async def compute_log_probs(
        self, samples: Sequence[TrainingSample], *, policy: trainer_pb2.PolicyKind.ValueType, temperature: float
    ) -> list[trainer_pb2.TokenLogProbs]:
        """One for each sample, in their order. samples: checked."""
        plan = self._plan(samples)
        commands = [
            ranks_pb2.RankComputeLogProbs(policy=policy, temperature=temperature, micro_batches=_pick(samples, micro_batches))
            for micro_batches in plan
        ]
        answers = await self.ranks.call_each([ranks_pb2.TrainerRankCommand(compute_log_probs=command) for command in commands])
        scored: dict[int, trainer_pb2.TokenLogProbs] = {}
        for micro_batches, answer in zip(plan, answers, strict=True):
            indices = [index for micro_batch in micro_batches for index in micro_batch]
            scored.update(zip(indices, answer.compute_log_probs.samples, strict=True))
        return [scored[index] for index in range(len(samples))]

    def _plan(self, samples: Sequence[TrainingSample]) -> batch.MicroBatchPlan:
        lengths = [batch.sample_length(sample) for sample in samples]
        return batch.plan_micro_batches(lengths, num_ranks=self.ranks.num_ranks, max_tokens=self._limits.micro_batch_tokens)


def _pick(samples: Sequence[TrainingSample], micro_batches: Sequence[Sequence[int]]) -> list[TrainingSamples]:
    return [TrainingSamples(samples=[samples[index] for index in indices]) for indices in micro_batches]
