"""A whole node of one family on one GPU: `python -m tools.bench.family_gpu FAMILY ... [--out FOLDER] [--changeovers 20] [--lora RANK]`.

A model with random weights, of a published shape, where needed with fewer layers. First transformers' own module, in bfloat16 and with
recomputation, makes the forward and backward passes of a step's samples. Then a node of the same model generates a batch (64 x 2,
256 + 512 tokens), trains --steps steps on it, and walks through changeovers, each with a short batch and a small training step. Prints the
gap of rollout's log-probs to the trainer's, the errors of both, and of transformers, against float32, tokens a second of both training
steps and of generation, the driver's bytes on the GPU by phase with their drift, and the planner's. Writes family_gpu.json after each
family. --tiny: the tests' small models, on a CPU. --alone: without the step of transformers.

A model with a vision tower gets another picture in each prompt, and the gap is also that of as long prompts of text alone. --prompts 256:
that many prompts of 64 + 256 tokens beside the pictures', one sample of each.
"""

import argparse
import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tasuki.client import Client, Phase
from tasuki.client.types import Sample, TrainingSample
from tasuki.config.load import load_config
from tasuki.models.images import ImageProcessor, read_image_processor
from tasuki.node.start import start_node
from tasuki.planner.choose import plan_node
from tasuki.planner.node import GB
from tests.models import CONFIGS, char_tokenizer, save_checkpoint
from tests.models import make_model as make_tiny
from tools.bench.changeover_gpu import smallest_gpu, taken_bytes
from tools.bench.gpus import at_least_one, require_gpus
from tools.bench.node_load import GPU, TINY, Load

STEPS = 3
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-4b": (
        "Qwen3Config",
        {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": True},
    ),
    "qwen3.5-4b": (
        "Qwen3_5Config",
        {"text_config": {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
                         "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248_320, "linear_num_value_heads": 32,
                         "tie_word_embeddings": True, "full_attention_interval": 4,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                                             "mrope_section": [11, 11, 10], "mrope_interleaved": True}},
         "vision_config": {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": 2560,
                           "deepstack_visual_indexes": []},
         "tie_word_embeddings": True},
    ),
    "qwen3.5-35b-a3b-4-layers": (
        "Qwen3_5MoeConfig",
        {"text_config": {"num_hidden_layers": 4, "full_attention_interval": 4,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                                             "mrope_section": [11, 11, 10], "mrope_interleaved": True}},
         "vision_config": {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": 2048,
                           "deepstack_visual_indexes": []},
         "tie_word_embeddings": False},
    ),
    "qwen3-moe-8-layers": (
        "Qwen3MoeConfig",
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 128, "vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
         "norm_topk_prob": True, "max_position_embeddings": 40_960},
    ),
    "glm-4.7-flash-4-layers": (
        "Glm4MoeLiteConfig", {"num_hidden_layers": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
                              "first_k_dense_replace": 1},
    ),
    "qwen3-vl-4b": (
        "Qwen3VLConfig",
        {"text_config": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
                         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
                                             "mrope_interleaved": True}},
         "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
                           "deepstack_visual_indexes": [5, 11, 17]},
         "tie_word_embeddings": True},
    ),
    "qwen2.5-vl-7b": (
        "Qwen2_5_VLConfig",
        {"text_config": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
                         "num_key_value_heads": 4, "vocab_size": 152_064, "max_position_embeddings": 128_000,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
         "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
         "tie_word_embeddings": False},
    ),
    "gemma-4-12-layers": (
        "Gemma4Config",
        {"text_config": {"num_hidden_layers": 12}, "vision_config": {"num_hidden_layers": 1}, "audio_config": None},
    ),
    # transformers' own range of random weights makes outputs of experts of this size large, and rounding with them.
    "gpt-oss-20b-4-layers": (
        "GptOssConfig", {"num_hidden_layers": 4, "num_local_experts": 32, "swiglu_limit": 7.0, "initializer_range": 0.01},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts of a step, and the files of each one's images."""

    prompts: list[list[int]]
    images: list[list[bytes]]

    def first(self, count: int) -> "Questions":
        return Questions(self.prompts[:count], self.images[:count])


def ask(folder: Path, load: Load, random: np.random.Generator) -> Questions:
    """Random text, after a picture if the model reads any."""
    prompts = load.questions(random)
    if read_image_processor(folder) is None:
        return Questions(prompts, [])
    config = _config(folder)
    marked = [config[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")]
    return Questions([marked + prompt for prompt in prompts], [[picture(load, random)] for _ in prompts])


def picture(load: Load, random: np.random.Generator) -> bytes:
    """A JPEG of blurred random colours: of a photo's size, 640 x 480, but for the small models."""
    width, height = (640, 480) if load.device == "cuda" else (64, 48)
    colours = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    Image.fromarray(colours).resize((width, height)).save(file := io.BytesIO(), "JPEG")
    return file.getvalue()


def with_picture(folder: Path, load: Load) -> Load:
    """The load with the tokens of a picture among those of the prompt."""
    if (processor := read_image_processor(folder)) is None:
        return load
    num_tokens = processor.num_tokens(picture(load, np.random.default_rng(0)), field="image")
    return replace(load, prompt_tokens=load.prompt_tokens + num_tokens + 2)


def prepare(families: Sequence[str], folder: str, load: Load, *, alone: bool = False) -> dict[str, float]:
    """Writes model folders with random weights; returns tokens a second of each one's plain step, unless `alone`."""
    models = ((family, _prepare(family, Path(folder, family), load)) for family in families)
    return {family: 0.0 if alone else plain_rate(model, Path(folder, family), load) for family, model in models}


def _prepare(family: str, folder: Path, load: Load) -> Any:
    if load.device == "cpu":
        save_checkpoint(model := make_tiny(family, seed=0), folder)
        if "vision_config" in (config := _config(folder)):
            _write_processor(folder, config)
            model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
        return model
    name, settings = SHAPES[family]
    config = getattr(transformers, name)(**settings)
    auto = transformers.AutoModelForImageTextToText if "text_config" in settings else transformers.AutoModelForCausalLM
    char_tokenizer().save_pretrained(folder)
    with torch.device(load.device):
        model = auto.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="8GB")
    _write_processor(folder, _config(folder))
    return model


def _write_processor(folder: Path, config: dict[str, Any]) -> None:
    """Of a Qwen tower; others are neither loaded nor trained."""
    if "spatial_merge_size" not in (vision := config.get("vision_config", {})):
        return
    settings = {"patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"]}
    settings |= {"image_processor_type": "Qwen2VLImageProcessorFast", "temporal_patch_size": vision["temporal_patch_size"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def plain_rate(model: Any, folder: Path, load: Load) -> float:
    """Returns tokens a second of forward and backward passes by transformers' own module, 16 rows of one length at once."""
    model.train()
    model.gradient_checkpointing_enable()
    processor, random = read_image_processor(folder), np.random.default_rng(0)
    if processor is not None:
        model.model.visual.requires_grad_(False)
    load = replace(load, prompts=16)
    rates = list[float]()
    for _ in range(STEPS + 1):
        asked = ask(folder, load, random)
        answers = random.integers(3, load.vocab_size, (load.prompts, load.new_tokens)).tolist()
        inputs = model_inputs(model, asked, answers, processor)
        ids = inputs["input_ids"]
        started = time.perf_counter()
        model(**inputs, labels=ids, use_cache=False).loss.backward()
        if load.device == "cuda":
            torch.cuda.synchronize()
        rates.append(ids.numel() / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def model_inputs(
    model: Any, asked: Questions, answers: Sequence[Sequence[int]], processor: ImageProcessor | None
) -> dict[str, torch.Tensor]:
    """Arguments of transformers' module for prompts and completions of one length."""
    if processor is None or not asked.images:
        rows = [[*prompt, *answer] for prompt, answer in zip(asked.prompts, answers, strict=True)]
        return {"input_ids": torch.tensor(rows, device=model.device)}
    prepared = [processor.expand(prompt, images) for prompt, images in zip(asked.prompts, asked.images, strict=True)]
    ids = torch.tensor([[*each.token_ids, *answer] for each, answer in zip(prepared, answers, strict=True)])
    in_prompt = torch.arange(ids.shape[1]) < len(prepared[0].token_ids)
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.tensor(np.concatenate([each.pixels(2) for each in prepared])),
        "image_grid_thw": torch.tensor(np.concatenate([each.grids_I3 for each in prepared])),
        "mm_token_type_ids": ((ids == model.config.image_token_id) & in_prompt).int(),
    }
    return {name: value.to(model.device) for name, value in inputs.items()}


def apart(families: Sequence[str], folder: str, load: Load) -> dict[str, float]:
    """`prepare` in a process of its own, which frees the GPU when it ends."""
    call = f"from tools.bench.family_gpu import *; print(json.dumps(prepare({list(families)}, {folder!r}, {load!r})))"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def trained(samples: list[Sample], asked: Questions, random: np.random.Generator, *, version: int) -> list[TrainingSample]:
    return [
        TrainingSample(
            prompt_token_ids=asked.prompts[sample.prompt_index],
            images=asked.images[sample.prompt_index] if asked.images else (),
            image_digest=sample.image_digest,
            completion_token_ids=sample.token_ids,
            rollout_log_probs=sample.rollout_log_probs,
            advantages=float(random.normal()),
            policy_version=version,
            routed_experts=sample.routed_experts,
        )
        for sample in samples
    ]


def errors(folder: Path, batch: list[TrainingSample], trainers: list[Any], load: Load) -> dict[str, float]:
    """Mean errors of log-probs of rollout, trainer and transformers' own module in the model's dtype, against it in float32."""
    auto = transformers.AutoModelForImageTextToText if "vision_config" in _config(folder) else transformers.AutoModelForCausalLM
    scored = dict[str, list[np.ndarray]](rollout=[each.rollout_log_probs for each in batch], trainer=trainers)
    for name, dtype in (("transformers", "auto"), ("float32", torch.float32)):
        model = auto.from_pretrained(folder, dtype=dtype).to(load.device).eval()
        scored[name] = [_log_probs(model, each, read_image_processor(folder)) for each in batch]
        del model
        torch.cuda.empty_cache()
    exact = np.concatenate(scored.pop("float32"))
    return {name: float(np.abs(np.concatenate(each) - exact).mean()) for name, each in scored.items()}


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@torch.no_grad()
def _log_probs(model: Any, sample: TrainingSample, processor: ImageProcessor | None) -> np.ndarray:
    asked, num_tokens = Questions([list(sample.prompt_token_ids)], [list(sample.images)]), len(sample.completion_token_ids)
    inputs = model_inputs(model, asked, [sample.completion_token_ids], processor if sample.images else None)
    logits = model(**inputs, use_cache=False).logits[0, -num_tokens - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, inputs["input_ids"][0, -num_tokens:, None])[:, 0].cpu().numpy()


def _gap(client: Client, batch: list[TrainingSample]) -> dict[str, float]:
    scored = client.compute_log_probs(batch)
    gaps = np.concatenate([np.abs(each.rollout_log_probs - mine) for each, mine in zip(batch, scored, strict=True)])
    return {"mean": float(gaps.mean()), "p99": float(np.quantile(gaps, 0.99)), "max": float(gaps.max())}


def walk(
    client: Client, folder: Path, load: Load, result: dict[str, Any], *, steps: int, changeovers: int
) -> tuple[list[TrainingSample], list[Any]]:
    """Returns a few samples of the first version and the trainer's log-probs of them."""
    random = np.random.default_rng(0)
    asked, whole = ask(folder, load, random), with_picture(folder, load)
    text = Questions(whole.questions(random), []) if asked.images else None
    client.acquire(Phase.ROLLOUT)
    started = time.perf_counter()
    samples = generate(client, asked, load, load.new_tokens, num_samples=load.group)
    result["generated_tokens_per_s"] = round(sum(len(each.token_ids) for each in samples) / (time.perf_counter() - started))
    of_text = None if text is None else generate(client, text, load, load.new_tokens, num_samples=load.group)
    result["generated_gb"] = round(taken_bytes(load.device) / GB, 2)
    client.acquire(Phase.TRAIN)
    version = client.trainer_state().policy_version
    batch = trained(samples, asked, random, version=version)
    result["gap"] = _gap(client, batch)
    if text is not None and of_text is not None:
        result["gap_of_text"] = _gap(client, trained(of_text, text, random, version=version))
    # transformers would ask for an image where a completion has its token.
    image_token = _config(folder).get("image_token_id")
    few = [each for each in batch if image_token not in each.completion_token_ids][:8]
    few_of_first = few, client.compute_log_probs(few)
    if len(samples[0].routed_experts):
        result["gap_without_replay"] = _gap(client, [replace(each, routed_experts=()) for each in batch])
    tokens = sum(whole.prompt_tokens + len(each.completion_token_ids) for each in batch)
    rates = list[float]()
    for _ in range(steps):
        started = time.perf_counter()
        metrics = client.forward_backward(batch).metrics
        grad_norm = client.optim_step(learning_rate=1e-6).grad_norm
        rates.append(tokens / (time.perf_counter() - started))
        result["metrics"] = {name: round(value, 6) for name, value in (*metrics.items(), ("grad_norm", grad_norm))}
    result["trained_tokens_per_s"] = [round(rate) for rate in rates]
    result["trained_gb"] = round(taken_bytes(load.device) / GB, 2)
    taken: dict[str, list[int]] = {"rollout": [], "train": []}
    seconds: dict[str, list[float]] = {"rollout": [], "train": []}
    for _ in range(changeovers):
        started = time.perf_counter()
        client.acquire(Phase.ROLLOUT)
        seconds["rollout"].append(time.perf_counter() - started)
        drawn = generate(client, asked.first(4), load, 16)
        taken["rollout"].append(taken_bytes(load.device))
        started = time.perf_counter()
        client.acquire(Phase.TRAIN)
        seconds["train"].append(time.perf_counter() - started)
        client.forward_backward(trained(drawn, asked, random, version=client.trainer_state().policy_version))
        client.optim_step(learning_rate=1e-6)
        taken["train"].append(taken_bytes(load.device))
    for phase, sizes in taken.items():
        steady = sizes[2:] or sizes
        result[f"{phase}_ms"] = round(1000 * statistics.median(seconds[phase]), 1)
        result[f"{phase}_gb"] = [round(steady[0] / GB, 2), round(steady[-1] / GB, 2), round(max(sizes) / GB, 2)]
    return few_of_first


def generate(client: Client, asked: Questions, load: Load, num_tokens: int, *, num_samples: int = 1) -> list[Sample]:
    return client.generate(asked.prompts, load.sampling(num_tokens), num_samples=num_samples, images=asked.images)


def one(
    folder: Path,
    family: str,
    load: Load,
    result: dict[str, Any],
    *,
    out: Path,
    steps: int,
    changeovers: int,
    lora: int | None,
    overrides: list[str],
) -> None:
    result["before_gb"] = round(taken_bytes(load.device) / GB, 2)
    file = folder / f"{family}.toml"
    adapters = f"[trainer.lora]\nrank = {lora}\n" if lora else ""
    text = with_picture(folder / family, load).config("needed").replace("node-needed", f"node-{family}")
    text = text.replace('path = "model"', f'path = "{family}"')
    # The bench draws advantages itself; a group may be one sample.
    text = text.replace("[train.reward]", '[train.advantages]\nestimator = "globally_whitened"\n[train.reward]')
    file.write_text(text.replace("[train]", adapters + "[train]", 1))
    config = load_config(file, overrides=overrides)
    started, told = time.monotonic(), list[str]()
    try:
        node = start_node(config, tell=told.append)
        result |= {"started_s": round(time.monotonic() - started, 1), "told": told[-4:]}
        try:
            with Client(state_dir=config.state_dir, timeout_s=300) as client:
                few = walk(client, folder / family, load, result, steps=steps, changeovers=changeovers)
        finally:
            node.stop()
    finally:
        if (logs := config.state_dir / "logs").is_dir():  # not if the start was refused
            shutil.copytree(logs, out / f"logs-{family}", dirs_exist_ok=True)
    result["errors"] = errors(folder / family, *few, load)
    audit = [sys.executable, "-m", "tasuki.cli", "audit", str(config.state_dir)]
    result["audit"] = subprocess.run(audit, capture_output=True, text=True, check=False).returncode
    if load.device == "cuda":
        planned = plan_node(load_config(config.state_dir / "node.toml"), gpu_bytes=smallest_gpu(), host_bytes=2000 * GB)
        result["planned_gb"] = {each.stage: round(each.gpu_bytes / GB, 2) for each in planned.stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", choices=(*SHAPES, *CONFIGS), metavar="FAMILY")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--steps", type=at_least_one, default=STEPS)
    parser.add_argument("--changeovers", type=at_least_one, default=20)
    parser.add_argument("--lora", type=at_least_one)
    parser.add_argument("--prompts", type=at_least_one)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="a key of the node's configuration")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--alone", action="store_true")
    arguments = parser.parse_args()
    load = TINY
    if not arguments.tiny:
        require_gpus()
        load = replace(GPU, gpus=1, group=2)
    if arguments.prompts is not None:
        load = replace(load, prompts=arguments.prompts, group=1)
        load = load if arguments.tiny else replace(load, prompt_tokens=64, new_tokens=256)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        given = arguments.families, str(folder), load
        rates = prepare(*given, alone=True) if arguments.alone else apart(*given)
        torch.cuda.empty_cache()
        for family in arguments.families:
            results[family] = {"transformers_tokens_per_s": round(rates[family])}
            try:
                one(
                    folder,
                    family,
                    load,
                    results[family],
                    out=arguments.out,
                    steps=arguments.steps,
                    changeovers=arguments.changeovers,
                    lora=arguments.lora,
                    overrides=arguments.set,
                )
            finally:
                print(family, json.dumps(results[family], indent=1), flush=True)
                (arguments.out / "family_gpu.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
