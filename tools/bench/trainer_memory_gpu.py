"""Training that sleeps in every step against training that does not, on a GPU: `python tools/bench/trainer_memory_gpu.py [--out FOLDER]`.

One FSDP2 rank, shapes of Qwen2.5-1.5B with random weights, float32 masters, AdamW, bfloat16 compute, the same data in every step. The two
runs have separate processes; their losses and gradient norms must be equal. Times are from an idle device to an idle device; "step" is
ForwardBackward and OptimStep. Writes trainer_memory_gpu.json and prints a table. --tiny tries it on a CPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = [str(REPOSITORY / "protos"), str(REPOSITORY / "services"), str(REPOSITORY)]
NUM_STEPS, NUM_SAMPLES, SAMPLE_TOKENS = 10, 16, 512
GB = 10**9


def make_model(folder: Path, *, is_tiny: bool) -> None:
    """Writes a Hugging Face folder with random weights, in bfloat16."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes = {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "vocab_size": 151936,
    }
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    config = Qwen2Config(**(tiny if is_tiny else sizes), num_key_value_heads=2, tie_word_embeddings=True, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.device("cpu" if is_tiny else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def train(model: Path, *, device: str, sleeps: bool) -> dict[str, Any]:
    """Returns losses, gradient norms and seconds of NUM_STEPS steps; optionally all tags sleep between any two steps."""
    from tasuki.algorithms.loss_types import LossConfig
    from tasuki.models.known import read_model_shape
    from tasuki.trainer.data.micro_batch import micro_batch
    from tasuki.trainer.launch import read_launch
    from tasuki.trainer.replicas import start_mesh
    from tasuki.trainer.resident_tags import TAGS
    from tasuki.trainer.service.requests import decode_samples
    from tasuki.trainer.wire import Role
    from tasuki.wire.stages import MemoryTag
    from tests.integration.learning import fsdp, start_learner

    torch.use_deterministic_algorithms(True)
    mesh = start_mesh(device, launch=read_launch(os.environ), gpu=0, num_threads=1, timeout_s=60)
    learner = start_learner(model, mesh=mesh, compute_dtype="bfloat16", learning_rate=1e-4, checkpointing="full")
    memory = fsdp(learner).memory
    config = LossConfig(denominator=NUM_SAMPLES * SAMPLE_TOKENS // 2)
    made = decode_samples(samples(read_model_shape(model).vocab_size))
    batches = [
        micro_batch(made.select([index]), config=config, policy_version=0, device=learner.backend.device)
        for index in range(NUM_SAMPLES)
    ]
    result: dict[str, Any] = {"losses": [], "step_ms": [], "pause_ms": [], "resume_ms": [], "asleep_bytes": []}
    for _ in range(NUM_STEPS):
        norm: list[float] = []

        def step(norm: list[float] = norm) -> None:
            report = learner.forward_backward(Role.POLICY, batches, config=config)
            norm += [report.loss, learner.optim_step(Role.POLICY).grad_norm]

        result["step_ms"].append(timed_ms(step, device))
        result["losses"].append(norm)
        if sleeps:
            result["pause_ms"].append(timed_ms(lambda: memory.pause_tags(TAGS), device))
            result["asleep_bytes"].append(used_bytes(device))
            result["resume_ms"].append(timed_ms(lambda: memory.resume_tags(TAGS), device))
    memory.wait_for_content()
    result["tag_bytes"] = {MemoryTag.of(usage.tag): usage.total_bytes for usage in memory.usage()}
    result["awake_bytes"] = used_bytes(device)
    return result


def samples(vocab_size: int) -> list[Any]:
    """Makes samples, half of each the prompt, with invented log-probs and advantages that are the same in every run."""
    from tasuki.v1.types_pb2 import TrainingSample

    random = torch.Generator().manual_seed(1)
    half = SAMPLE_TOKENS // 2
    made: list[TrainingSample] = []
    for index in range(NUM_SAMPLES):
        tokens = torch.randint(vocab_size, (SAMPLE_TOKENS,), generator=random).tolist()
        made.append(
            TrainingSample(
                prompt_token_ids=tokens[:half],
                completion_token_ids=tokens[half:],
                rollout_log_probs=[-11.0] * half,
                advantages=[1.0 if index % 2 else -1.0] * half,
            )
        )
    return made


def used_bytes(device: str) -> int:
    """Bytes in use on the device, by any process; 0 on a CPU."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def timed_ms(call: Callable[[], object], device: str) -> float:
    def idle() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    idle()
    start = time.perf_counter()
    call()
    idle()
    return 1e3 * (time.perf_counter() - start)


def run_part(part: str, model: Path, device: str) -> dict[str, Any]:
    launch = [sys.executable, "-m", "tasuki.trainer.launch", "--num-ranks", "1", "--"]
    command = [*launch, str(Path(__file__).resolve()), "--part", part, "--model", str(model), "--device", device]
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": os.pathsep.join(SOURCES)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or not answers:
        raise SystemExit(f"{part} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(answers[-1].removeprefix("RESULT "))


def table(awake: dict[str, Any], sleeper: dict[str, Any]) -> list[str]:
    lines = [f"losses and gradient norms of {NUM_STEPS} steps equal: {awake['losses'] == sleeper['losses']}"]
    for name, values in (
        ("step, awake", awake["step_ms"]),
        ("step, after a sleep", sleeper["step_ms"]),
        ("pause of all tags", sleeper["pause_ms"]),
        ("resume of all tags", sleeper["resume_ms"]),
    ):
        # The first time of each includes pinning memory, compilation and warm-up.
        low, median, high = statistics.quantiles(values[1:], n=4)
        lines.append(f"{name:24s} {median:9.1f} ms ({low:.1f}..{high:.1f}), first {values[0]:.1f}")
    tags = ", ".join(f"{tag} {num_bytes / GB:.2f} GB" for tag, num_bytes in sleeper["tag_bytes"].items())
    lines.append(f"tags: {tags}; on the device awake {sleeper['awake_bytes'] / GB:.2f} GB")
    lines.append(f"still used while asleep: {max(sleeper['asleep_bytes']) / GB:.2f} GB")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--part", choices=("model", "awake", "sleeper"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.part is not None and arguments.model is None:
        parser.error("--part needs --model FOLDER")
    sys.path[:0] = SOURCES
    if arguments.device == "cuda" and not arguments.tiny:
        from tools.bench.gpus import require_gpus

        require_gpus()
    if arguments.part == "model":
        make_model(arguments.model, is_tiny=arguments.device == "cpu")
        print("RESULT {}", flush=True)
    elif arguments.part is not None:
        result = train(arguments.model, device=arguments.device, sleeps=arguments.part == "sleeper")
        print("RESULT " + json.dumps(result), flush=True)
        os._exit(0)
    else:
        compare(arguments.out, device="cpu" if arguments.tiny else arguments.device)


def compare(out: Path, *, device: str) -> None:
    """Runs each part in a separate process, alone on the device."""
    with tempfile.TemporaryDirectory() as folder:
        run_part("model", Path(folder), device)
        results = {part: run_part(part, Path(folder), device) for part in ("awake", "sleeper")}
    out.mkdir(parents=True, exist_ok=True)
    machine = {"gpu": torch.cuda.get_device_name() if device == "cuda" else "none", "torch": torch.__version__}
    (out / "trainer_memory_gpu.json").write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")
    print("\n".join(table(results["awake"], results["sleeper"])))


if __name__ == "__main__":
    main()
