"""Publication of weights with merged adapters on one GPU: `python -m tools.bench.merged_publication_gpu [--out FOLDER] [--layers N]`.

Layers of Qwen2.5-32B with random weights and adapters of rank 32, in one rank, as one of two ranks has of all 64 layers. The published copy
leaves after each round. Milliseconds, of rounds after the first: mapping the copy's memory, writing and summing it, and releasing it, each
until the GPU is idle. One more round is profiled: seconds of its kernels, and how long none ran. Writes merged_publication_gpu.json.
--tiny tries it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tools.bench.gpus import at_least_one, require_gpus
from tools.bench.kernel_times import kernel_times, profiled
from tools.bench.plan_gpu import SOURCES, layout_of, make_model_apart

NUM_ROUNDS, SIZE, RANK = 10, "qwen2.5-32b", 32


def measure(folder: Path, *, device: str) -> dict[str, Any]:
    """Measures the rounds in this process, which is the only rank."""
    from tasuki.trainer.backends.fsdp.lora.adapters import adapter_parameters
    from tasuki.trainer.backends.fsdp.mesh import start_mesh
    from tasuki.trainer.launch import read_launch
    from tests.integration.learning import fsdp, start_learner

    mesh = start_mesh(device, launch=read_launch(os.environ), gpu=0, num_threads=1, timeout_s=60)
    lora = {"rank": RANK}
    learner = start_learner(
        folder,
        mesh=mesh,
        compute_dtype="bfloat16",
        checkpointing="full",
        export_stays=False,
        lora=lora,
        rollout={"lora": "merged"},
    )
    backend = fsdp(learner)
    took: defaultdict[str, list[float]] = defaultdict(list)

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def timed(name: str, call: Callable[[], object]) -> None:
        synchronize()
        started = time.perf_counter()
        call()
        synchronize()
        took[name].append(1000 * (time.perf_counter() - started))

    def change() -> None:
        with torch.no_grad():
            for _, parameter in adapter_parameters(backend._policy.causal_lm):
                parameter.normal_(std=0.01)

    def publish() -> None:
        backend.publish(policy_version=0)

    for _ in range(NUM_ROUNDS + 1):
        change()
        timed("map", lambda: backend.memory.export(backend._make_export))
        timed("publish", publish)
        backend.withdraw()
        timed("release", backend.memory.release_export)
    result: dict[str, Any] = {
        name: {
            "median": round(statistics.median(values[1:]), 2),
            "worst": round(max(values[1:]), 2),
            "first": round(values[0], 2),
        }
        for name, values in took.items()
    }
    if device == "cuda":
        change()
        backend.memory.export(backend._make_export)
        with profiled() as kernels:
            publish()
        result["profile"] = asdict(kernel_times(kernels))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--layers", type=at_least_one, default=32)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = "cpu" if arguments.tiny else "cuda"
    if arguments.part is not None:
        print("RESULT " + json.dumps(measure(Path(arguments.part), device=device)), flush=True)
        os._exit(0)
    if not arguments.tiny:
        require_gpus(1)
    layout = layout_of("qwen2.5-0.5b" if arguments.tiny else SIZE, gpu_bytes=1, device=device, num_ranks=1)
    if not arguments.tiny:
        layout = replace(layout, model=replace(layout.model, num_layers=arguments.layers))
    with tempfile.TemporaryDirectory() as folder:
        make_model_apart(Path(folder), layout, device)
        part = ["-m", "tools.bench.merged_publication_gpu", "--part", folder, *(["--tiny"] if arguments.tiny else [])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])}
        launch = [sys.executable, "-m", "tasuki.trainer.launch", "--num-ranks", "1", "--", *part]
        said = subprocess.run(launch, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("RESULT ")]
    result = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "layers": layout.model.num_layers}
    result |= json.loads(line.removeprefix("RESULT "))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "merged_publication_gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
