"""Pause and resume on a GPU, ours and torch_memory_saver's side by side: `python tools/bench/memory_gpu.py [--out FOLDER]`.

Every part runs in a separate process, so that one failure costs one part. Ours and the peer's take turns in alternating order, and the
times of all turns are merged, since the driver's own times drift by more than the two differ. Weights have the tensors of Qwen2.5-7B (15.2
GB), the KV pool has 56 tensors (28 layers). Times are from an idle device to an idle device. "at once" resumes right after the pause, when
the driver may still scrub freed memory; "later" waits 2 s before. Writes memory_gpu.json, prints a table.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
GB, GIB = 10**9, 1 << 30
LATER_S = 2.0
NUM_REPEATS, NUM_LATER, NUM_HOST_REPEATS = 10, 3, 4
# torch_memory_saver ends the process if one of its tensors is freed outside a region: keep them until the part has printed its result.
_peer_tensors: list[torch.Tensor] = []


def qwen_7b_shapes() -> list[tuple[int, ...]]:
    hidden, kv, mlp, vocab = 3584, 512, 18944, 152064
    matrices = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden), (mlp, hidden), (mlp, hidden), (hidden, mlp)]
    layer: list[tuple[int, ...]] = [*matrices, (hidden,), (hidden,), (hidden,), (kv,), (kv,)]
    return [(vocab, hidden), *(layer * 28), (hidden,), (vocab, hidden)]


def fill(region: Callable[[str], Any], kv_gb: int) -> list[torch.Tensor]:
    with region("weights"):
        tensors = [torch.ones(shape, dtype=torch.bfloat16, device="cuda") for shape in qwen_7b_shapes()]
    with region("kv_cache"):
        tensors += [torch.ones(kv_gb * GB // 56 // 2, dtype=torch.bfloat16, device="cuda") for _ in range(56)]
    torch.cuda.synchronize()
    return tensors


def timed_ms(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def cycles(
    pause: Callable[[str], object], resume: Callable[[str], object], *, num_repeats: int, wait_s: float
) -> dict[str, Any]:
    """Milliseconds of each step, in the order of a changeover; the first cycle is a warm-up and kept apart."""
    steps: dict[str, list[float]] = {
        name: [] for name in ("pause kv_cache", "pause weights", "resume weights", "resume kv_cache")
    }
    asleep_free_gb = 0.0
    for _ in range(num_repeats + 1):
        steps["pause kv_cache"].append(timed_ms(lambda: pause("kv_cache")))
        steps["pause weights"].append(timed_ms(lambda: pause("weights")))
        asleep_free_gb = torch.cuda.mem_get_info()[0] / GB
        time.sleep(wait_s)
        steps["resume weights"].append(timed_ms(lambda: resume("weights")))
        steps["resume kv_cache"].append(timed_ms(lambda: resume("kv_cache")))
    return {
        "times_ms": {name: [round(value, 3) for value in times[1:]] for name, times in steps.items()},
        "first_ms": {name: round(times[0], 3) for name, times in steps.items()},
        "asleep_free_gb": round(asleep_free_gb, 2),
    }


def our_allocator() -> Any:
    from tasuki.memory.arena import NativeAllocator
    from tasuki.wire.stages import MemoryTag

    return NativeAllocator(tags=[MemoryTag.WEIGHTS, MemoryTag.KV_CACHE, MemoryTag.OPTIMIZER], device="cuda:0")


def ours(kv_gb: int) -> dict[str, Any]:
    from tasuki.memory.arena import Keep
    from tasuki.wire.stages import MemoryTag

    allocator = our_allocator()
    tensors = fill(lambda tag: allocator.region(MemoryTag(tag)), kv_gb)
    addresses = [tensor.data_ptr() for tensor in tensors]
    result: dict[str, Any] = {
        "num_chunks": {
            MemoryTag.of(usage.tag): allocator.arena(MemoryTag.of(usage.tag)).usage().num_chunks for usage in allocator.usage()
        }
    }
    pause, resume = lambda tag: allocator.pause([MemoryTag(tag)]), lambda tag: allocator.resume([MemoryTag(tag)])
    for name, policy in (("drop", Keep.NOTHING), ("keep chunks", Keep.CHUNKS)):
        for tag in (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE):
            allocator.arena(tag).set_policy(policy)
        result[f"{name}, at once"] = cycles(pause, resume, num_repeats=NUM_REPEATS, wait_s=0)
        result[f"{name}, later"] = cycles(pause, resume, num_repeats=NUM_LATER, wait_s=LATER_S)
    result["same_addresses"] = addresses == [tensor.data_ptr() for tensor in tensors]
    return result


def peers(kv_gb: int) -> dict[str, Any]:
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "torch"
    _peer_tensors.extend(fill(lambda tag: saver.region(tag=tag), kv_gb))
    return {
        "drop, at once": cycles(saver.pause, saver.resume, num_repeats=NUM_REPEATS, wait_s=0),
        "drop, later": cycles(saver.pause, saver.resume, num_repeats=NUM_LATER, wait_s=LATER_S),
        "num_tensors": len(_peer_tensors),
    }


def our_host_copy() -> dict[str, Any]:
    from tasuki.memory.arena import Keep
    from tasuki.wire.stages import MemoryTag

    allocator = our_allocator()
    allocator.arena(MemoryTag.WEIGHTS).set_policy(Keep.CONTENT)
    tensors = fill(lambda tag: allocator.region(MemoryTag(tag)), 1)
    sample = [tensor.flatten()[:7].clone() for tensor in tensors[:300]]
    pause, resume = lambda tag: allocator.pause([MemoryTag(tag)]), lambda tag: allocator.resume([MemoryTag(tag)])
    result = {"host copy, at once": cycles(pause, resume, num_repeats=NUM_HOST_REPEATS, wait_s=0)}
    result["content_is_back"] = all(torch.equal(old, new.flatten()[:7]) for old, new in zip(sample, tensors, strict=False))
    return result


def peers_host_copy() -> dict[str, Any]:
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "torch"
    _peer_tensors.extend(fill(lambda tag: saver.region(tag=tag, enable_cpu_backup=tag == "weights"), 1))
    return {"host copy, at once": cycles(saver.pause, saver.resume, num_repeats=2, wait_s=0), "num_tensors": len(_peer_tensors)}


def pinned_rate() -> dict[str, float]:
    """GB/s of one large copy between pinned host memory and the device, the upper bound of a host copy."""
    host, device = (
        torch.empty(4 * GIB, dtype=torch.uint8, pin_memory=True),
        torch.empty(4 * GIB, dtype=torch.uint8, device="cuda"),
    )
    rates = {}
    for name, target, source in (("to_host", host, device), ("to_device", device, host)):
        times = [timed_ms(lambda to=target, of=source: to.copy_(of, non_blocking=True)) for _ in range(4)]
        rates[f"{name}_gb_per_s"] = round(4 * GIB / min(times) / 1e6, 2)
    return rates


TURNS = (("tasuki 15+100 GB", "torch_memory_saver 15+100 GB"),)
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "pinned rate": pinned_rate,
    "tasuki 15+100 GB": lambda: ours(100),
    "torch_memory_saver 15+100 GB": lambda: peers(100),
    "tasuki host copy 15 GB": our_host_copy,
    "torch_memory_saver host copy 15 GB": peers_host_copy,
}


def run_part(name: str, deadline_s: float) -> dict[str, Any]:
    if deadline_s < 15:
        return {"error": "skipped: no time left"}
    command = [sys.executable, str(Path(__file__).resolve()), "--part", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(deadline_s, 100), check=False)
    except subprocess.TimeoutExpired:
        return {"error": "ran past its time"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or not answers:
        return {"error": (done.stderr or done.stdout)[-2000:], "exit_status": done.returncode}
    return json.loads(answers[-1].removeprefix("RESULT "))


def schedule(rounds: int) -> list[str]:
    """Runs every part once, and those that take turns once per round, with the pair's order alternating."""
    turns = [part for turn in range(rounds) for pair in TURNS for part in (pair if turn % 2 == 0 else pair[::-1])]
    return ["pinned rate", *turns, *(part for part in PARTS if part not in {"pinned rate", *turns})]


def put_together(result: dict[str, Any], more: dict[str, Any]) -> None:
    """Adds the times of another turn of the same part."""
    for name, measured in more.items():
        if name in result and isinstance(measured, dict) and "times_ms" in measured:
            for step, times in measured["times_ms"].items():
                result[name]["times_ms"][step] += times
        else:
            result[name] = measured


def comparison(results: dict[str, Any]) -> list[str]:
    steps = ("pause kv_cache", "pause weights", "resume weights", "resume kv_cache")
    lines = [f"{'':48s}{''.join(f'{step:>24s}' for step in (*steps, 'whole cycle'))}   ms: median (quartiles)"]
    for part, result in results.items():
        for name, measured in result.items():
            if isinstance(measured, dict) and "times_ms" in measured:
                times = [measured["times_ms"][step] for step in steps]
                quartiles = [
                    statistics.quantiles(each, n=4) for each in (*times, [sum(cycle) for cycle in zip(*times, strict=True)])
                ]
                numbers = "".join(f"{f'{mid:.1f} ({low:.1f}..{high:.1f})':>24s}" for low, mid, high in quartiles)
                lines.append(f"{part + ', ' + name:48s}{numbers}")
            elif name not in ("num_chunks", "num_tensors"):
                lines.append(f"{part}, {name}: {measured}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=3, help="how often ours and the peer's take turns")
    parser.add_argument("--limit-s", type=float, default=900, help="parts that do not fit any more are skipped")
    arguments = parser.parse_args()
    sys.path[:0] = [str(REPOSITORY / "protos"), str(REPOSITORY / "services"), str(REPOSITORY)]
    from tools.bench.gpus import require_gpus

    require_gpus()
    if arguments.part is not None:
        print("RESULT " + json.dumps(PARTS[arguments.part]()), flush=True)
        os._exit(0)  # without freeing _peer_tensors
    arguments.out.mkdir(parents=True, exist_ok=True)
    start, results = time.monotonic(), dict[str, dict[str, Any]]()
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda, "kernel": platform.release(),
    }  # fmt: skip
    for name in schedule(arguments.rounds):
        began = time.monotonic()
        result = run_part(name, arguments.limit_s - (began - start))
        put_together(results.setdefault(name, {}), result)
        print(f"{name}: {time.monotonic() - began:.0f} s {result.get('error', '')}", flush=True)
        report = {"machine": machine, "results": results}
        (arguments.out / "memory_gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(comparison(results)))


if __name__ == "__main__":
    main()
