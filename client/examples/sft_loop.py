"""The whole supervised loop: take a batch, compute gradients, take an optimizer step, repeat. Does not use rollout.

`tasuki train` runs this file for a table [sft]; it is also importable as tasuki.client.sft_loop. Copy it to write a loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tasuki.algorithms.loss_types import Aggregation, LossConfig
from tasuki.algorithms.losses.sft import SftLoss
from tasuki.client.dataset import Dataset
from tasuki.client.loop_state import PendingStep, is_save_due, note_updated, save_checkpoint, write_pending
from tasuki.client.progress import Progress
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.client.types import Phase, TrainingSample
from tasuki.config.train_schema import SftConfig
from tasuki.wire.errors import GradientsNotFinite


@dataclass(slots=True)
class SftLoop:
    """One run: the node, the data and the settings. num_steps: also where the settings give epochs."""

    client: Client
    dataset: Dataset[TrainingSample]
    eval_samples: Sequence[TrainingSample]
    settings: SftConfig
    num_steps: int
    save_now: Callable[[], bool] = lambda: False
    """Polled after each training step: whether to save it even if no checkpoint is due."""
    progress: Progress = field(default_factory=Progress)

    def run(self, report: Callable[[Step], None], *, first_step: int = 0, pending: PendingStep | None = None) -> None:
        """Trains from `first_step` on. `report` gets each finished step, and a last one with the held-out loss only.

        pending: the first step, if an interrupted run had begun its update. It is not made twice.
        """
        settings = self.settings
        if pending is not None:
            self.learn(pending)
            report(pending.step)
            first_step += 1
        for number in range(first_step, self.num_steps + 1):
            step = Step(number)
            self.progress.begin(number, "to_train")
            step.acquire(self.client, Phase.TRAIN)
            step.policy_version = self.client.trainer_state().policy_version
            is_last = number == self.num_steps
            if self.eval_samples and (is_last or number % (settings.eval_every or self.num_steps) == 0):
                self.evaluate(step)
            if not is_last:
                self.learn(PendingStep(step, schedule_steps=settings.num_steps))
            report(step)
        self.progress.begin(self.num_steps, "export")
        self.client.export_model(settings.output_dir / "model")

    def evaluate(self, step: Step) -> None:
        """Computes the held-out loss: the mean negative log-probability of all counted tokens."""
        with self.progress.timed(step, "evaluate"):
            rows = self.client.compute_log_probs(self.eval_samples)
        log_probs_N = np.concatenate(rows).astype(np.float64)
        mask_N = np.concatenate([np.asarray(sample.loss_mask) for sample in self.eval_samples])
        step.metrics["eval/loss"] = -float((log_probs_N * mask_N).sum() / mask_N.sum())

    def learn(self, pending: PendingStep) -> None:
        """Runs one step: a batch, an optimizer step, and a checkpoint if one is due."""
        step = pending.step
        samples = self.dataset.next_rows(self.settings.samples_per_step)
        step.position = self.dataset.position()
        if not pending.is_updated:
            self.update(pending, samples)
        if self.save_now() or is_save_due(step, self.settings.save_every):
            self.progress.begin(step.step, "save")
            save_checkpoint(pending, self.client, self.dataset.position(), output_dir=self.settings.output_dir)

    def update(self, pending: PendingStep, samples: Sequence[TrainingSample]) -> None:
        """Computes the batch's gradients and takes an optimizer step."""
        step, request_id = pending.step, pending.request_id
        write_pending(self.settings.output_dir, pending)
        with self.progress.timed(step, "forward_backward"):
            loss = LossConfig(loss=SftLoss(), aggregation=Aggregation(self.settings.aggregation))
            done = self.client.forward_backward(samples, loss, request_id=request_id)
        with step.timed("optim_step"):
            try:
                stepped = self.client.optim_step(
                    schedule_step=step.step, schedule_steps=pending.schedule_steps, request_id=f"{request_id}-step"
                )
            except GradientsNotFinite:
                note_updated(self.settings.output_dir, pending)  # --resume goes on with the next batch
                raise
        step.num_policy_steps, step.num_skipped_updates = int(not stepped.is_skipped), int(stepped.is_skipped)
        step.grad_norm, step.learning_rate = stepped.grad_norm, stepped.learning_rate
        step.mean_num_tokens = float(np.mean([len(sample.completion_token_ids) for sample in samples]))
        num_read = sum(len(sample.prompt_token_ids) + len(sample.completion_token_ids) for sample in samples)
        step.metrics |= {**done.metrics, "loss": done.loss, "num_tokens": done.num_tokens, "num_read_tokens": num_read}
