"""Load of the whole-node benchmarks: configuration, samples, and a model with random weights."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasuki.client import SamplingParams, TrainingSample

CONFIG = """
state_dir = "node-{kv}"
device = "{device}"
[model]
path = "model"
[trainer]
num_ranks = {gpus}
checkpointing = "full"
{trainer}
[rollout]
dp_size = {gpus}
context_length = {context}
{rollout}
[train]
dataset = "unused.jsonl"
output_dir = "unused"
prompts_per_step = {prompts}
group_size = {group}
max_prompt_tokens = {prompt_tokens}
max_new_tokens = {new_tokens}
[train.reward]
function = "unused:unused"
"""
# Triton's kernels, and torch's sampling: FlashAttention and FlashInfer are not installed where this runs.
ENGINE = 'engine = { attention_backend = "triton", mm_attention_backend = "triton_attn", sampling_backend = "pytorch" }\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Prompts, samples and sizes of a benchmark step."""

    device: str
    gpus: int
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    round_tokens: int
    """Tokens of each sample in a round's batch."""
    trained_samples: int
    vocab_size: int
    context: int

    def config(self, kv: str) -> str:
        is_gpu = self.device == "cuda"
        text = CONFIG.format(
            kv=kv,
            device=self.device,
            gpus=self.gpus,
            context=self.context,
            prompts=self.prompts,
            group=self.group,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            trainer=f"micro_batch_tokens = {16_384 if is_gpu else 512}",
            rollout=ENGINE if is_gpu else "",
        )
        # Without a run nothing bounds the cache but kv_ratio.
        return text if kv == "needed" else text[: text.index("[train]")]

    def questions(self, random: np.random.Generator) -> list[list[int]]:
        return random.integers(3, self.vocab_size, (self.prompts, self.prompt_tokens)).tolist()

    @staticmethod
    def sampling(num_tokens: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)

    def samples(self, random: np.random.Generator, *, count: int, version: int) -> list[TrainingSample]:
        return [
            TrainingSample(
                prompt_token_ids=random.integers(3, self.vocab_size, self.prompt_tokens).tolist(),
                completion_token_ids=random.integers(3, self.vocab_size, self.new_tokens).tolist(),
                rollout_log_probs=np.full(self.new_tokens, -11.0, dtype=np.float32),
                advantages=float(random.normal()),
                policy_version=version,
            )
            for _ in range(count)
        ]


GPU = Load(
    device="cuda", gpus=2, prompts=64, group=8, prompt_tokens=256, new_tokens=512, round_tokens=192, trained_samples=128,
    vocab_size=30_000, context=4096,
)  # fmt: skip
TINY = Load(
    device="cpu", gpus=1, prompts=4, group=2, prompt_tokens=16, new_tokens=16, round_tokens=8, trained_samples=8,
    vocab_size=100, context=128,
)  # fmt: skip


def make_model(size: str, folder: Path, *, is_tiny: bool) -> None:
    """Makes the model in a child process, which frees the GPU when it ends."""
    call = f"from tools.bench.plan_node_gpu import make; make({size!r}, {str(folder)!r})"
    if is_tiny:
        call = f"from pathlib import Path; from tests.models import *; save_checkpoint(make_model('qwen2', seed=0), Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", call], check=True, stderr=subprocess.DEVNULL)
