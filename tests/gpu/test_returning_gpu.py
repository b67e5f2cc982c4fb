"""Training that begins while weights return from the host: bit for bit equal to training with weights that never left.

Needs `make native` and a CUDA GPU; two for the case of two ranks.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen2Config

from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.learner import Learner
from tasuki.trainer.wire import Role
from tasuki.wire.stages import MemoryTag
from tests.gpu.conftest import VOCAB_SIZE
from tests.gpu.test_checkpointing_gpu import samples_of
from tests.integration.learning import learn, start_learner, whole_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

NUM_TURNS, SCRIBBLE_BYTES = 4, 16 << 30


def _gradients(learner: Learner) -> dict[str, Tensor]:
    learn(learner, Role.POLICY, samples_of(0), config=LossConfig(), max_tokens=8192)
    gradients = {name: gradient.clone() for name, gradient in whole_gradients(learner, Role.POLICY).items()}
    learner.backend.clear_gradients(Role.POLICY)
    return gradients


def _scribble() -> None:
    """Overwrites free device memory, so that the pages handed out next hold no old weights."""
    torch.full((SCRIBBLE_BYTES // 4,), torch.nan, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _rank(rank: int, num_ranks: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store-{num_ranks}", num_ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cuda", (num_ranks,), mesh_dim_names=("dp",))
    settings = {"compute_dtype": "bfloat16", "micro_batch_tokens": 8192, "checkpointing": "none"}
    learner = start_learner(Path(folder) / "model", mesh=mesh, **settings)
    expected = _gradients(learner)
    for turn in range(NUM_TURNS):
        assert learner.backend.memory.pause_tags([MemoryTag.WEIGHTS]) > 0
        _scribble()
        # Without the barrier, a rank that waits in `resume` for a later one would have its weights back already.
        dist.barrier()
        learner.backend.memory.resume_tags([MemoryTag.WEIGHTS])
        found = _gradients(learner)
        different = [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)]
        assert not different, f"turn {turn}: {different}"
    learner.backend.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("returning")
    config = Qwen2Config(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=20, num_attention_heads=16, num_key_value_heads=16,
        vocab_size=VOCAB_SIZE, max_position_embeddings=1024, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    return folder


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_forward_pass_waits_for_the_weights_that_it_reads(folder: Path, num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    multiprocessing.set_executable(sys.executable)
    multiprocessing.spawn(_rank, (num_ranks, str(folder)), nprocs=num_ranks)
