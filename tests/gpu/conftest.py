"""Fixtures for tests on a GPU."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, Qwen2Config

from tasuki.memory.arena import Keep, NativeAllocator
from tasuki.wire.stages import MemoryTag

VOCAB_SIZE = 4096
"""Of `model`."""
WEIGHTS, OPTIMIZER, KV_CACHE, CUDA_GRAPH = MemoryTag.WEIGHTS, MemoryTag.OPTIMIZER, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH


@pytest.fixture
def allocator():
    made = NativeAllocator(
        tags=[WEIGHTS, OPTIMIZER, KV_CACHE, CUDA_GRAPH],
        device="cuda:0",
        keep={OPTIMIZER: Keep.CONTENT, CUDA_GRAPH: Keep.CONTENT},
    )
    yield made
    gc.collect()
    torch.cuda.synchronize()
    made.close()
    torch.cuda.empty_cache()


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One rank."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Qwen2's architecture, in which no heads share keys."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=16,
        vocab_size=VOCAB_SIZE, max_position_embeddings=1024, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder
