"""Steps whose samples share prompts, and whose ranks share micro-batches, against plain steps: every role, adapters, over gRPC."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.planner.kept_bytes import kept_with_attention
from tasuki.planner.step_bytes import _attention_per_token
from tasuki.trainer.backends.fsdp.memory import HostActivations
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.data.plan import Sharing, plan_shared
from tasuki.trainer.data.samples import Samples
from tasuki.trainer.modules.recompute import _Keeping
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.v1 import loss_pb2
from tasuki.v1.types_pb2 import TrainingSample
from tests.extent import IS_WHOLE, crossed
from tests.integration.learning import COST, fsdp, learn, start_learner, whole_gradients, whole_parameters
from tests.integration.one_rank import mesh
from tests.integration.trainer_process import TrainerProcess, connect, start_trainer
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE, make_model, save_checkpoint

__all__ = ["mesh"]

SETTINGS = 'compute_dtype = "float32"\nlearning_rate = 1e-3\nmicro_batch_tokens = 64\n'
NUM_GROUPS, GROUP_SIZE = 5, 4
# It needs the log-probs of whole sequences.
GSPO = loss_pb2.LossConfig(name="gspo", settings={"entropy_coef": 0.01})
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("qwen2", seed=0), tmp_path_factory.mktemp("model") / "qwen2")


def grouped_samples() -> list[TrainingSample]:
    """Groups with one prompt each."""
    samples = make_samples(NUM_GROUPS * GROUP_SIZE, vocab_size=VOCAB_SIZE, temperature=0.8)
    for index, sample in enumerate(samples):
        prompt = np.random.default_rng(index % NUM_GROUPS).integers(3, VOCAB_SIZE, size=12 + index % NUM_GROUPS)
        sample.prompt_token_ids[:] = prompt.tolist()
        sample.values[:] = [0.1] * len(sample.completion_token_ids)
        sample.returns[:] = [0.3 * (index % 3)] * len(sample.completion_token_ids)
    return samples


def shared(samples: Samples) -> Samples:
    return plan_shared(samples, num_ranks=1, max_tokens=4096, cost=COST, sharing=Sharing.ALWAYS)[0]


@pytest.mark.parametrize(("checkpointing", "lora"), crossed(["none", "attention", "full", "offloaded"], [None, {"rank": 4}]))
def test_a_step_of_every_role_is_equal_to_rounding(
    model: Path, mesh: DeviceMesh, lora: dict[str, Any] | None, checkpointing: str
) -> None:
    alone = decode_samples(grouped_samples())
    together = shared(alone)
    assert len(token_batch(together, device=torch.device("cpu")).input_ids_T) < 0.7 * int(alone.num_tokens_S.sum())
    settings = {"learning_rate": 1e-3, "eps": 1e-3, "lora": lora, "critic": {}, "checkpointing": checkpointing}
    results: list[tuple[Any, ...]] = []
    for samples in (alone, together):
        learner = start_learner(model, mesh=mesh, **settings)
        batch = token_batch(samples, device=torch.device("cpu"))
        scores = [learner.score(role, [batch])[0] for role in Role]
        reports, tensors = [], {}
        for role, config in ((Role.POLICY, LossConfig(kl_coef=0.1)), (Role.CRITIC, LossConfig(loss=ValueLoss()))):
            reports.append(learn(learner, role, samples, config=config).loss)
            tensors |= {f"{role}.grad.{name}": tensor for name, tensor in whole_gradients(learner, role).items()}
            learner.optim_step(role)
            tensors |= {f"{role}.{name}": tensor for name, tensor in whole_parameters(learner, role).items()}
        results.append((scores, reports, tensors))
        learner.backend.close()
    (scores, losses, tensors), (shared_scores, shared_losses, shared_tensors) = results
    for one, other in zip(scores, shared_scores, strict=True):
        torch.testing.assert_close(other, one, **CLOSE)
    assert shared_losses == pytest.approx(losses, abs=1e-5)
    assert tensors.keys() == shared_tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(shared_tensors[name], tensor, **CLOSE, msg=name)


@pytest.mark.parametrize("checkpointing", ["attention", "offloaded"])
def test_kept_results_of_both_calls_of_attention_are_planned(
    tmp_path: Path, mesh: DeviceMesh, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences are longer than those that a CPU attends to by plain products, whose results are not kept."""
    num_prompt, num_completion, num_layers = 280, 300, 3
    model = save_checkpoint(
        make_model("llama", seed=0, num_hidden_layers=num_layers, max_position_embeddings=1024), tmp_path / "long"
    )
    samples = [
        TrainingSample(
            prompt_token_ids=[3 + place % 100 for place in range(num_prompt)],
            completion_token_ids=[5 + index] * num_completion,
            rollout_log_probs=[-5.0] * num_completion,
            advantages=[1.0] * num_completion,
        )
        for index in range(GROUP_SIZE)
    ]
    num_tokens = num_prompt + GROUP_SIZE * num_completion
    stayed: list[int] = []
    kept: list[int] = []
    room, keep = HostActivations._room, _Keeping.__torch_dispatch__

    def spied_room(self: HostActivations, layer: int, source: torch.Tensor) -> torch.Tensor | None:
        held = room(self, layer, source)
        if held is None and layer < self._last:
            stayed.append(source.nbytes)
        return held

    def spied_keep(self: _Keeping, func: Any, *rest: Any) -> Any:
        result = keep(self, func, *rest)
        if func in self._results:
            kept.extend(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    monkeypatch.setattr(HostActivations, "_room", spied_room)
    monkeypatch.setattr(_Keeping, "__torch_dispatch__", spied_keep)
    settings = {"checkpointing": checkpointing, "micro_batch_tokens": num_tokens, "prefix_sharing": True}
    learner = start_learner(model, mesh=mesh, **settings)
    learn(learner, Role.POLICY, decode_samples(samples), config=LossConfig(), max_tokens=num_tokens)
    layout = fsdp(learner)._planned
    assert not stayed, "everything has room in host memory"
    alone = num_tokens * kept_with_attention(layout, 0)
    planned = layout.rank_tokens * _attention_per_token(layout)
    if checkpointing == "attention":
        assert num_layers * alone < sum(kept) <= num_layers * planned
    learner.backend.close()


@pytest.fixture(scope="module")
def trainers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TrainerProcess]]:
    """Trainers without sharing, with it and two ranks per micro-batch, and in `make chaos` also with it on one rank."""
    kinds = (
        (1, "prefix_sharing = false\n"),
        (2, "prefix_sharing = true\nsequence_parallel = 2\n"),
        *([(1, "prefix_sharing = true\n")] if IS_WHOLE else []),
    )
    trainers = [
        start_trainer(tmp_path_factory.mktemp("node"), model, num_ranks=num_ranks, settings=SETTINGS + settings)
        for num_ranks, settings in kinds
    ]
    for trainer in trainers:
        trainer.wait_until_serving()
    yield trainers
    for trainer in trainers:
        trainer.stop()


async def test_a_step_over_grpc_is_equal_and_takes_fewer_micro_batches(trainers: list[TrainerProcess]) -> None:
    answers, steps, scores = [], [], []
    for trainer in trainers:
        async with connect(trainer) as client:
            answers.append(await client.forward_backward(grouped_samples(), loss=GSPO))
            steps.append(await client.optim_step())
            scores.append(await client.log_probs(grouped_samples()))
    alone, *others = answers
    for answer, step, rows in zip(others, steps[1:], scores[1:], strict=True):
        assert answer.num_micro_batches < alone.num_micro_batches
        assert answer.num_tokens == alone.num_tokens
        assert answer.loss == pytest.approx(alone.loss, rel=1e-5, abs=1e-6)
        assert answer.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6)
        assert step.grad_norm == pytest.approx(steps[0].grad_norm, rel=1e-5)
        # After a step: if a gradient is near 0, rounding decides Adam's first one.
        for mine, theirs in zip(rows, scores[0], strict=True):
            assert list(mine) == pytest.approx(list(theirs), abs=1e-4)
