"""Starts that fail, ranks that die, and checkpoints that outlive the number of ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from tasuki.v1 import trainer_pb2
from tasuki.wire.errors import from_rpc_error
from tests.integration.trainer_process import TrainerClient, TrainerProcess, connect, is_alive, start_trainer
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE, make_model, save_checkpoint

STOP_S = 10.0
FLOAT32 = 'compute_dtype = "float32"'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("llama", seed=2), tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def two_ranks(model: Path, tmp_path: Path) -> Iterator[TrainerProcess]:
    trainer = start_trainer(tmp_path / "node", model, num_ranks=2, settings=FLOAT32)
    trainer.wait_until_serving()
    yield trainer
    trainer.stop()


def raise_unless_gone(pids: list[int], *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.05)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_takes_the_whole_trainer_with_it(two_ranks: TrainerProcess, victim: int) -> None:
    pids = two_ranks.rank_pids()
    assert len(pids) == 2
    os.kill(pids[victim], signal.SIGKILL)
    raise_unless_gone([*pids, two_ranks.process.pid], within_s=STOP_S + 5)
    assert two_ranks.process.wait() != 0


def test_a_killed_launcher_leaves_no_rank_and_no_socket_behind(two_ranks: TrainerProcess) -> None:
    pids = two_ranks.rank_pids()
    os.kill(two_ranks.process.pid, signal.SIGKILL)
    raise_unless_gone(pids, within_s=STOP_S)
    assert list((two_ranks.state_dir / "run").glob("*.sock")) == []


async def test_a_rank_that_dies_in_a_call_is_named_in_its_error(two_ranks: TrainerProcess) -> None:
    async with connect(two_ranks) as channel:
        client = TrainerClient(channel)
        victim = two_ranks.rank_pids()[1]
        os.kill(victim, signal.SIGSTOP)
        call = client.forward_backward(make_samples(8, vocab_size=VOCAB_SIZE))
        task_error: grpc.aio.AioRpcError | None = None
        started = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        task_error = raised.value
        assert time.monotonic() - started < STOP_S
    assert "rank 1" in from_rpc_error(task_error).message


async def test_two_ranks_save_and_one_goes_on_where_they_were(two_ranks: TrainerProcess, model: Path, tmp_path: Path) -> None:
    samples = make_samples(9, vocab_size=VOCAB_SIZE)
    async with connect(two_ranks) as channel:
        client = TrainerClient(channel)
        await client.forward_backward(samples)
        await client.optim_step(learning_rate=1e-3)
        await client.save(tmp_path / "checkpoint")
        await client.forward_backward(samples)
        step_of_two = await client.optim_step(learning_rate=1e-3)
        log_probs_of_two = await client.log_probs(samples, trainer_pb2.POLICY_KIND_POLICY)
    one_rank = start_trainer(tmp_path / "other-node", model, num_ranks=1, settings=FLOAT32)
    try:
        one_rank.wait_until_serving()
        async with connect(one_rank) as channel:
            client = TrainerClient(channel)
            assert (await client.load(tmp_path / "checkpoint")).policy_version == 1
            assert (await client.state()).policy_version == 1
            await client.forward_backward(samples)
            step_of_one = await client.optim_step(learning_rate=1e-3)
            log_probs_of_one = await client.log_probs(samples, trainer_pb2.POLICY_KIND_POLICY)
    finally:
        one_rank.stop()
    assert step_of_one.policy_version == step_of_two.policy_version == 2
    assert step_of_one.grad_norm == pytest.approx(step_of_two.grad_norm, rel=1e-5)
    # The second step is Adam's second: it is the same only if both moments and their step number came along.
    for one, two in zip(log_probs_of_one, log_probs_of_two, strict=True):
        assert torch.allclose(torch.tensor(one), torch.tensor(two), atol=1e-4)


def failed_start(trainer: TrainerProcess) -> str:
    """The one line that the trainer says before it ends."""
    assert trainer.process.wait(120) != 0
    lines = [line for line in trainer.log.read_text().splitlines() if line.startswith("tasuki: error")]
    assert len(lines) == 1, trainer.log.read_text()[-4000:]
    assert list((trainer.state_dir / "run").glob("*.sock")) == []
    return lines[0]


def test_a_missing_model_folder_is_one_line(tmp_path: Path) -> None:
    line = failed_start(start_trainer(tmp_path / "node", tmp_path / "nothing", num_ranks=2))
    assert "PATH_NOT_FOUND" in line
    assert str(tmp_path / "nothing") in line


def test_an_unknown_architecture_is_one_line_with_the_known_ones(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    line = failed_start(start_trainer(tmp_path / "node", folder, num_ranks=2))
    assert "UNSUPPORTED_MODEL" in line
    assert "GPT2LMHeadModel" in line
    assert "Qwen2ForCausalLM" in line


def test_a_tensor_of_another_shape_is_one_line(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB_SIZE + 5}))
    (folder / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    line = failed_start(start_trainer(tmp_path / "node", folder, num_ranks=1))
    assert "INVALID_ARGUMENT" in line
    assert "model.embed_tokens.weight" in line


def test_a_second_trainer_on_the_same_state_folder_is_refused(two_ranks: TrainerProcess, model: Path) -> None:
    first_log = two_ranks.log.read_text()
    second = start_trainer(two_ranks.state_dir, model, num_ranks=2)
    assert second.process.wait(120) != 0
    assert "NODE_RUNNING" in second.log.read_text()
    assert "event=serving" in first_log
    assert all(is_alive(pid) for pid in two_ranks.rank_pids())
