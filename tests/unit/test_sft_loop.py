"""The supervised loop on a client in memory: its calls, their order, and the figures of its steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from tasuki.algorithms.loss_types import Aggregation, LossConfig
from tasuki.algorithms.losses.sft import SftLoss
from tasuki.client.dataset import Dataset
from tasuki.client.encode import forward_backward_result
from tasuki.client.sft_loop import SftLoop
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.client.types import ForwardBackwardResult, Role, TrainerState, TrainingSample
from tasuki.config.train_schema import SftConfig
from tasuki.v1.trainer_pb2 import ForwardBackwardResponse
from tests.unit.loop_node import LoopClient

SAMPLES = [
    TrainingSample(prompt_token_ids=[1], completion_token_ids=[token, 2], loss_mask=np.array([1, token % 2], dtype=np.float32))
    for token in range(10, 15)
]


@dataclass(slots=True)
class SftClient(LoopClient):
    """A client whose log-probs are minus a tenth of the token."""

    def trainer_state(self) -> TrainerState:
        return TrainerState(policy_version=self.policy_version)

    def compute_log_probs(self, samples: Sequence[TrainingSample], *, role: Role = Role.POLICY) -> list[NDArray[np.float32]]:
        LoopClient.compute_log_probs(self, samples, role=role)
        return [(np.asarray(sample.completion_token_ids) / -10).astype(np.float32) for sample in samples]

    def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        loss: LossConfig,
        *,
        role: Role = Role.POLICY,
        log_probs_of: Sequence[int] = (),
        request_id: str = "",
    ) -> ForwardBackwardResult:
        LoopClient.forward_backward(self, samples, loss, role=role)
        return forward_backward_result(ForwardBackwardResponse(loss=1.5, num_tokens=7, metrics={"entropy": 0.5}))


@pytest.fixture
def settings(tmp_path: Path) -> SftConfig:
    return SftConfig(dataset=tmp_path, samples_per_step=2, output_dir=tmp_path, aggregation="sequence_mean_token_mean")


def steps_of(
    client: LoopClient, settings: SftConfig, *, eval_samples: Sequence[TrainingSample] = (), first_step: int = 0
) -> list[Step]:
    steps: list[Step] = []
    loop = SftLoop(cast(Client, client), Dataset(SAMPLES, seed=1), eval_samples, settings, 3)
    loop.run(steps.append, first_step=first_step)
    return steps


def test_a_step_is_a_batch_and_an_update_and_rollout_is_never_asked_for(settings: SftConfig) -> None:
    client = SftClient()
    steps = steps_of(client, settings)
    step = ["acquire TRAIN", "forward_backward", "optim_step"]
    assert client.verbs() == [*step * 3, "acquire TRAIN", "export_model"]
    assert [call.schedule_step for call in client.of("optim_step")] == [0, 1, 2]
    order = Dataset(SAMPLES, seed=1)
    for call in client.of("forward_backward"):
        assert call.samples == order.next_rows(2)
        assert call.loss == LossConfig(loss=SftLoss(), aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN)
    assert [(one.step, one.policy_version, one.next_version()) for one in steps] == [(0, 0, 1), (1, 1, 2), (2, 2, 3), (3, 3, 3)]
    batch = client.of("forward_backward")[0].samples
    num_read = sum(len([*sample.prompt_token_ids, *sample.completion_token_ids]) for sample in batch)
    assert steps[0].metrics == {"loss": 1.5, "num_tokens": 7, "num_read_tokens": num_read, "entropy": 0.5}
    assert [one.is_evaluation for one in steps] == [False, False, False, True]


@pytest.mark.parametrize(("eval_every", "measured"), [(None, [0, 3]), (2, [0, 2, 3]), (1, [0, 1, 2, 3])])
def test_the_held_out_loss_counts_tokens_under_the_mask(settings: SftConfig, eval_every: int | None, measured: list[int]):
    settings = SftConfig(dataset=settings.dataset, samples_per_step=2, output_dir=settings.output_dir, eval_every=eval_every)
    steps = steps_of(SftClient(), settings, eval_samples=SAMPLES[:2])
    assert [step.step for step in steps if "eval/loss" in step.metrics] == measured
    # Tokens 10, 11 and 2: the mask leaves out the first sample's last token.
    assert steps[0].metrics["eval/loss"] == pytest.approx((1.0 + 1.1 + 0.2) / 3)
