"""A rollout service that applies a LoRA adapter at run time: adapters change, the model stays.

Its two ranks cannot share the model evenly. Of 8 heads in SGLang's padded model the second rank has the 4 padding ones, and of 128 rows
between gate and down 32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tasuki.v1 import memory_pb2, types_pb2, weights_pb2
from tasuki.weights.export import Shard, WeightExport
from tests.integration.rollout_process import (
    CALL_TIMEOUT_S,
    RolloutProcess,
    connected,
    log_probs_of,
    start_rollout,
    stop_rollout,
    wait_until_serving,
)
from tests.models import make_model, save_checkpoint

# k_proj and up_proj without an adapter: their parts of SGLang's buffers must be zeros.
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
RANK, ALPHA = 3, 12
PATTERNS = {
    "rank_pattern": {r"1\..*_proj": 2, "gate_proj": 5},
    "alpha_pattern": {"v_proj": 30},
    "exclude_modules": ["0.mlp.down_proj"],
}
WEIGHTS = types_pb2.MEMORY_TAG_WEIGHTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("qwen2", seed=4, num_key_value_heads=1)
    return save_checkpoint(model, tmp_path_factory.mktemp("adapter-model") / "qwen2")


@pytest.fixture(scope="module")
def rollout(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutProcess]:
    process = start_rollout(
        tmp_path_factory.mktemp("adapter-node"),
        folder,
        'rollout.lora="adapter"',
        "rollout.tp_size=2",
        'rollout.dtype="float32"',
        f"trainer.lora.rank={RANK}",
        f"trainer.lora.alpha={ALPHA}",
        f"trainer.lora.target_modules={TARGETS}".replace("'", '"'),
        "trainer.lora.rank_pattern={'1\\..*_proj' = 2, gate_proj = 5}",
        "trainer.lora.alpha_pattern={v_proj = 30}",
        'trainer.lora.exclude_modules=["0.mlp.down_proj"]',
    )
    wait_until_serving(process)
    yield process
    assert stop_rollout(process) == 0, process.log.read_text()[-4000:]


@dataclass
class Adapter:
    """Trainer side: one rank's adapters, and the model with them in one process of transformers."""

    model: PeftModel
    export: WeightExport

    def publish(self, version: int, *, seed: int) -> weights_pb2.PublishedWeights:
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.model.named_parameters():
            if ".lora_" in name:
                param.data.normal_(std=0.2, generator=generator)
        self.export.publish(version)
        return weights_pb2.PublishedWeights(policy_version=version, boot_id="trainer", handles=[self.export.handle()])


@pytest.fixture
def adapter(folder: Path, rollout: RolloutProcess) -> Iterator[Adapter]:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, **PATTERNS))
    shards = [
        Shard(
            name.removeprefix("base_model.model.").replace(".default.", "."),
            tuple(param.shape),
            (0,) * param.dim(),
            param.detach(),
        )
        for name, param in model.named_parameters()
        if ".lora_" in name
    ]
    path = rollout.socket_dir / "trainer-0.sock"
    export = WeightExport(shards, rank=0, num_ranks=1, dtype=torch.float32, socket_path=path)
    yield Adapter(model, export)
    export.close()


async def test_every_version_generates_with_its_own_adapter_and_the_model_stays(rollout: RolloutProcess, adapter: Adapter):
    prompts = [[5, 6, 7], list(range(3, 40))]
    async with connected(rollout) as client:
        usage = await client.memory.GetUsage(memory_pb2.GetUsageRequest(), timeout=CALL_TIMEOUT_S)
        weights = next(usage for usage in usage.tags if usage.tag == WEIGHTS)
        assert weights.mapped_bytes > 0 and not weights.is_paused
        for version in range(3):
            received = await client.wake(adapter.publish(version, seed=version))
            assert received.copied_bytes == 4 * sum(
                param.numel() * (2 if is_on_both_ranks(name) else 1)
                for name, param in adapter.model.named_parameters()
                if ".lora_" in name
            )
            samples = await client.generate(prompts, num_samples=3, max_new_tokens=6, ignore_eos=True)
            assert {sample.policy_version for sample in samples} == {version}
            for sample in samples:
                theirs = log_probs_of(adapter.model, prompts[sample.prompt_index], list(sample.token_ids))
                assert torch.allclose(torch.tensor(sample.rollout_log_probs), theirs, atol=1e-4)
            await client.sleep()
            assert list((await client.state()).resident_tags) == [WEIGHTS], "what a trainer that starts must not wait for"


def is_on_both_ranks(name: str) -> bool:
    """Whether both ranks hold the tensor: they split A along the inputs of o_proj and down_proj, and B along the other outputs."""
    return ("lora_B" in name) == ("o_proj" in name or "down_proj" in name)
