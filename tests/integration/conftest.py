"""Services shared by the session: rollout with a real engine, a trainer inside this process, and one of two ranks."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.node_process import Start, nodes_in
from tests.integration.rollout_process import (
    RolloutClient,
    RolloutProcess,
    TestTrainer,
    asleep,
    left_of,
    serving_rollout,
    shared_memory,
    start_rollout,
    stop_rollout,
    wait_until_serving,
)
from tests.integration.trainer_process import (
    TrainerClient,
    TrainerProcess,
    ready_client,
    serving_trainer,
)
from tests.limits import limit_s
from tests.models import char_tokenizer, make_model, save_checkpoint

TOKENIZER_EOS = "~"
# The first variable would make log-probs those of temperature 1.
LEFT_IN_THE_SHELL = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "NVIDIA_TF32_OVERRIDE": "1"}
# 2 layers, keys and values, 2 heads of 16, bfloat16: 1 GiB.
KV_CACHE_TOKENS = (1 << 30) // (2 * 2 * 2 * 16 * 2)
TRAINER_SETTINGS = 'compute_dtype = "float32"\nlearning_rate = 1e-3\nmicro_batch_tokens = 128'


@pytest.fixture(scope="session")
def rollout_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint from which the shared engine starts; the tests publish other weights.

    Its tokenizer has another end-of-text token than its config.json.
    """
    folder = save_checkpoint(make_model("qwen2", seed=0), tmp_path_factory.mktemp("model") / "qwen2")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"eos_token": TOKENIZER_EOS}
    settings.setdefault("added_tokens_decoder", {})[str(char_tokenizer().convert_tokens_to_ids(TOKENIZER_EOS))] = {
        "content": TOKENIZER_EOS,
        "special": True,
    }
    file.write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def rollout_process(rollout_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutProcess]:
    rollout = start_rollout(
        tmp_path_factory.mktemp("node"),
        rollout_model,
        f"rollout.engine.max_total_tokens={KV_CACHE_TOKENS}",
        environment=LEFT_IN_THE_SHELL,
    )
    wait_until_serving(rollout)
    yield rollout
    ranks = psutil.Process(rollout.process.pid).children(recursive=True)
    shared = shared_memory([rollout.process.pid, *(rank.pid for rank in ranks)])
    assert stop_rollout(rollout) == 0, rollout.log.read_text()[-4000:]
    assert psutil.wait_procs(ranks, timeout=limit_s(10))[1] == []
    assert left_of(shared) == []
    assert sorted(path.name for path in rollout.socket_dir.iterdir()) == ["pulse", "start-rollout.json"]


@pytest.fixture(scope="session")
def engine_pair(rollout_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutProcess]:
    """A service whose engine has two ranks. A test of test_rollout_process.py poisons it, so that it ends."""
    with serving_rollout(tmp_path_factory.mktemp("pair"), rollout_model, "rollout.tp_size=2") as rollout:
        yield rollout


@pytest.fixture(scope="session")
def trainer(rollout_process: RolloutProcess) -> Iterator[TestTrainer]:
    """A trainer whose weights differ from those with which the engine started."""
    trainer = TestTrainer(rollout_process.socket_dir, "trainer", make_model("qwen2", seed=1))
    yield trainer
    trainer.close()


@pytest.fixture
async def rollout(rollout_process: RolloutProcess) -> AsyncIterator[RolloutClient]:
    """The shared service, asleep at the start of each test."""
    async with asleep(rollout_process) as client:
        yield client


@pytest.fixture(scope="session")
def trainer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("qwen2_tied", seed=5), tmp_path_factory.mktemp("trainer-model") / "qwen2")


@pytest.fixture(scope="session")
def trainer_process(trainer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerProcess]:
    folder = tmp_path_factory.mktemp("trainer-node")
    with serving_trainer(folder, trainer_model, num_ranks=2, settings=TRAINER_SETTINGS) as trainer:
        yield trainer
    left = list((trainer.state_dir / "run").glob("*.sock"))
    assert left == [], trainer.log.read_text()[-4000:]


@pytest.fixture
async def client(trainer_process: TrainerProcess) -> AsyncIterator[TrainerClient]:
    """The shared service, ready to train and without gradients."""
    async with ready_client(trainer_process) as client:
        yield client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with nodes_in(tmp_path) as start:
        yield start
