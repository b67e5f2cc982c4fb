"""Decodes a command for a rank, calls the worker, encodes its answer."""

from __future__ import annotations

import time
from pathlib import Path

from tasuki.config.failpoints import PUBLISHED
from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.rank_server import Handlers
from tasuki.rpc.usage import TAGS, usage_response
from tasuki.trainer.micro_batch import loss_batch, token_batch
from tasuki.trainer.worker import PolicyLossConfig, Worker
from tasuki.v1 import memory_pb2, ranks_pb2, trainer_pb2


class RankCommands:
    """One method for each field of TrainerRankCommand."""

    def __init__(self, worker: Worker, *, failpoints: Failpoints) -> None:
        self._worker, self._failpoints = worker, failpoints

    def handlers(self) -> Handlers:
        return {
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "discard_gradients": self.discard_gradients,
            "compute_log_probs": self.compute_log_probs,
            "publish_weights": self.publish_weights,
            "withdraw_weights": self.withdraw_weights,
            "save_checkpoint": self.save_checkpoint,
            "load_checkpoint": self.load_checkpoint,
            "export_model": self.export_model,
            "pause": self.pause,
            "resume": self.resume,
            "get_usage": self.get_usage,
        }

    def ready(self) -> ranks_pb2.RankReady:
        config = self._worker.model_config
        return ranks_pb2.RankReady(
            num_parameters=sum(param.numel() for param in self._worker.policy.parameters()),
            policy_version=self._worker.policy_version,
            vocab_size=config.vocab_size,
            context_length=config.max_position_embeddings,
        )

    def forward_backward(self, command: ranks_pb2.RankForwardBackward) -> trainer_pb2.ForwardBackwardResponse:
        worker, loss = self._worker, command.loss
        batches = [
            loss_batch(part.samples, policy_version=worker.policy_version, device=worker.device)
            for part in command.micro_batches
        ]
        report = worker.forward_backward(
            batches,
            loss=PolicyLossConfig(
                clip_low=loss.clip_low, clip_high=loss.clip_high, kl_coef=loss.kl_coef, temperature=loss.temperature
            ),
            num_loss_tokens=command.num_loss_tokens,
            num_gap_tokens=command.num_gap_tokens,
        )
        return trainer_pb2.ForwardBackwardResponse(
            loss=report.loss,
            clip_fraction=report.clip_fraction,
            ref_kl=report.ref_kl,
            max_log_prob_gap=report.max_log_prob_gap,
            mean_log_prob_gap=report.mean_log_prob_gap,
            entropy=report.entropy,
        )

    def optim_step(self, request: trainer_pb2.OptimStepRequest) -> trainer_pb2.OptimStepResponse:
        started = time.perf_counter()
        report = self._worker.optim_step(learning_rate=request.learning_rate if request.HasField("learning_rate") else None)
        return trainer_pb2.OptimStepResponse(
            policy_version=report.policy_version,
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            seconds=time.perf_counter() - started,
        )

    def discard_gradients(self, _: trainer_pb2.DiscardGradientsRequest) -> trainer_pb2.DiscardGradientsResponse:
        self._worker.discard_gradients()
        return trainer_pb2.DiscardGradientsResponse()

    def compute_log_probs(self, command: ranks_pb2.RankComputeLogProbs) -> ranks_pb2.RankLogProbs:
        batches = [token_batch(part.samples, device=self._worker.device) for part in command.micro_batches]
        is_reference = command.policy == trainer_pb2.POLICY_KIND_REFERENCE
        score = self._worker.reference_log_probs if is_reference else self._worker.policy_log_probs
        scored = score(batches, temperature=command.temperature)
        return ranks_pb2.RankLogProbs(samples=[trainer_pb2.TokenLogProbs(log_probs=log_probs) for log_probs in scored])

    def publish_weights(self, _: trainer_pb2.PublishWeightsRequest) -> ranks_pb2.RankPublished:
        export = self._worker.publish_weights()
        if self._failpoints.corrupts(PUBLISHED):
            self._worker.damage_published()
        return ranks_pb2.RankPublished(handle=export.handle, published_bytes=export.num_bytes)

    def withdraw_weights(self, _: trainer_pb2.WithdrawWeightsRequest) -> trainer_pb2.WithdrawWeightsResponse:
        self._worker.withdraw_weights()
        return trainer_pb2.WithdrawWeightsResponse()

    def save_checkpoint(self, request: trainer_pb2.SaveCheckpointRequest) -> trainer_pb2.SaveCheckpointResponse:
        started = time.perf_counter()
        num_bytes = self._worker.save_checkpoint(Path(request.path))
        return trainer_pb2.SaveCheckpointResponse(
            policy_version=self._worker.policy_version, bytes=num_bytes, seconds=time.perf_counter() - started
        )

    def load_checkpoint(self, request: trainer_pb2.LoadCheckpointRequest) -> trainer_pb2.LoadCheckpointResponse:
        self._worker.load_checkpoint(Path(request.path))
        return trainer_pb2.LoadCheckpointResponse(policy_version=self._worker.policy_version)

    def export_model(self, request: trainer_pb2.ExportModelRequest) -> trainer_pb2.ExportModelResponse:
        started = time.perf_counter()
        num_bytes = self._worker.export_model(Path(request.path))
        return trainer_pb2.ExportModelResponse(
            policy_version=self._worker.policy_version, bytes=num_bytes, seconds=time.perf_counter() - started
        )

    def pause(self, request: memory_pb2.PauseRequest) -> memory_pb2.PauseResponse:
        return memory_pb2.PauseResponse(released_bytes=self._worker.memory.pause([TAGS[tag] for tag in request.tags]))

    def resume(self, request: memory_pb2.ResumeRequest) -> memory_pb2.ResumeResponse:
        return memory_pb2.ResumeResponse(mapped_bytes=self._worker.memory.resume([TAGS[tag] for tag in request.tags]))

    def get_usage(self, _: memory_pb2.GetUsageRequest) -> memory_pb2.GetUsageResponse:
        return usage_response(self._worker.memory.usage(), self._worker.memory.device_usage())
