"""TRL's side of `trainer_peers_gpu`: steps of its GRPOTrainer on given completions, sharded by FSDP2 through accelerate.

Runs one rank; RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set. A single rank runs without sharding and without DDP.
Generation is a `rollout_func` that answers at once. TRL pads the samples of a step to the longest. Rank 0 prints RESULT and a JSON object.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUP, LEARNING_RATE = 8, 1e-6


class StepClock(TrainerCallback):
    """Wall-clock seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._last = self._now()

    def on_step_end(self, *_: object, **__: object) -> None:
        now = self._now()
        self.seconds.append(now - self._last)
        self._last = now

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def given(lengths: list[int], vocab_size: int) -> Any:
    """Returns a `rollout_func` that answers each call with samples of these lengths; the second half of each is its completion."""
    generator = torch.Generator().manual_seed(sum(lengths))
    samples = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]

    def rollout(prompts: list[Any], _: GRPOTrainer) -> dict[str, Any]:
        assert len(prompts) == len(samples), (len(prompts), len(samples))
        halves = [length // 2 for length in lengths]
        return {
            "prompt_ids": [sample[:-half] for sample, half in zip(samples, halves, strict=True)],
            "completion_ids": [sample[-half:] for sample, half in zip(samples, halves, strict=True)],
            "logprobs": [[-12.0] * half for half in halves],
        }

    return rollout


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per word; nobody reads the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{index}": index for index in range(vocab_size)}
    made = Tokenizer(models.WordLevel(words, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="t1", eos_token="t2", padding_side="left")


def leave_ranks() -> None:
    """Hides the ranks from accelerate, which would wrap even one in DDP and copy all gradients."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def config_of(work: dict[str, Any], arguments: argparse.Namespace, folder: Path, *, num_ranks: int) -> GRPOConfig:
    num_samples = sum(len(part) for parts in work["plan"] for part in parts) // num_ranks
    settings: dict[str, Any] = {"fsdp": True} if num_ranks > 1 else {}
    if num_ranks > 1:
        settings["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
        }
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=arguments.device == "cpu",
        bf16=arguments.device == "cuda",
        max_steps=work["steps"],
        per_device_train_batch_size=arguments.batch,
        gradient_accumulation_steps=num_samples // arguments.batch,
        num_generations=GROUP,
        max_completion_length=work["num_places"],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        gradient_checkpointing=arguments.recompute == "full",
        use_liger_kernel=arguments.liger,
        optim="adamw_torch_fused",
        model_init_kwargs={"dtype": torch.float32, "attn_implementation": arguments.attention},
        report_to="none",
        save_strategy="no",
        logging_steps=10_000,
        disable_tqdm=True,
        **settings,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="JSON: shape, plan (lengths by rank and micro-batch), num_places, steps")
    parser.add_argument("model", type=Path)
    parser.add_argument("--recompute", choices=("none", "full"), required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples a micro-batch")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    work, rank, num_ranks = json.loads(arguments.work.read_text()), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks == 1:
        leave_ranks()
    lengths = sorted(length for parts in work["plan"] for part in parts for length in part)
    clock, vocab_size = StepClock(), work["shape"]["vocab_size"]
    trainer = GRPOTrainer(
        model=str(arguments.model),
        processing_class=tokenizer(vocab_size),
        reward_funcs=lambda completions, **_: [float(index % 7) for index in range(len(completions))],
        args=config_of(work, arguments, arguments.work.parent / "trl", num_ranks=num_ranks),
        train_dataset=Dataset.from_list([{"prompt": f"t{3 + index}"} for index in range(len(lengths))]),
        callbacks=[clock],
        rollout_func=given(lengths[rank::num_ranks], vocab_size),
    )
    trainer.train()
    step_s = statistics.median(clock.seconds[1:])
    result = {
        "side": "trl",
        "recompute": arguments.recompute,
        "batch": arguments.batch,
        "attention": arguments.attention,
        "liger": arguments.liger,
        "micro_batch_places": arguments.batch * (max(length - length // 2 for length in lengths) + max(lengths) // 2),
        "seconds": [round(each, 3) for each in clock.seconds],
        "tokens_per_s": round(sum(lengths) / step_s / num_ranks),
    }
    if arguments.device == "cuda":
        free, total_bytes = torch.cuda.mem_get_info()
        result |= {"allocated_bytes": torch.cuda.max_memory_allocated(), "driver_bytes": total_bytes - free}
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # skip the process group's shutdown


if __name__ == "__main__":
    main()
