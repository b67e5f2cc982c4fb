"""Grouped products of experts beside dense ones: `python -m tools.bench.grouped_products_gpu [--tokens 16384] [--ranks 2]`.

Qwen3-30B-A3B's experts in bfloat16, even routing: forward, gradient of the rows, gradient of the weight. A dense product has as many rows
and the weight of one expert. Milliseconds are medians of 20 by CUDA events. --ranks: each has its part of the experts, and as many rows.
--tiny: small products, once, on a CPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import grouped_mm

from tasuki.planner.presets import MODELS
from tools.bench.gpus import at_least_one, require_gpus

MODEL = MODELS["qwen3-30b-a3b"]


def milliseconds(product: Callable[[], object], device: str) -> float:
    """Median of 20 calls after three."""
    if device == "cpu":
        started = time.perf_counter()
        product()
        return 1e3 * (time.perf_counter() - started)
    taken = list[float]()
    for number in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        product()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            taken.append(start.elapsed_time(end))
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=at_least_one, default=16_384)
    parser.add_argument("--ranks", type=at_least_one, default=1)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not arguments.tiny:
        require_gpus(1)
    device, shrink = ("cpu", 16) if arguments.tiny else ("cuda", 1)
    num_experts, hidden, inner = MODEL.num_experts // arguments.ranks, MODEL.hidden_size // shrink, MODEL.expert_size // shrink
    num_rows = arguments.tokens // shrink * MODEL.experts_per_token
    like = {"device": device, "dtype": torch.bfloat16}
    ends = (torch.arange(1, num_experts + 1, device=device) * num_rows // num_experts).int()
    for name, num_out, num_in in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        rows, grad = torch.randn(num_rows, num_in, **like), torch.randn(num_rows, num_out, **like)
        weights = torch.randn(num_experts, num_out, num_in, **like)
        operands = {"forward": (rows, weights.transpose(-2, -1)), "rows": (grad, weights), "weight": (grad.t(), rows)}
        for kind, (left, right) in operands.items():
            took = milliseconds(partial(grouped_mm, left, right, offs=ends), device)
            dense_took = milliseconds(partial(torch.mm, left, right[0] if right.dim() == 3 else right), device)
            rate = round(2 * num_rows * num_out * num_in / took / 1e9)
            line = {
                "matrix": name,
                "product": kind,
                "experts": num_experts,
                "tflops": rate,
                "of_dense": round(dense_took / took, 3),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
