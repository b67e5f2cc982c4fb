"""Log-probs, entropies and gradients of the vocabulary projection on one GPU: `python -m tools.bench.lm_head_gpu [--out FOLDER]`.

8,192 places, bfloat16, 151,936 tokens, forward and backward from an idle device to an idle device: medians of 20 in milliseconds, and the
most memory beyond inputs and the weight's gradient in GiB.
"products" are the four that any way without kept logits needs, whole and by themselves; "plain" is torch's log_softmax over all logits,
without an entropy; "ours frozen" is with a head that is not trained; "ours scoring" without backward. Writes lm_head_gpu.json.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tasuki.algorithms.lm_head import token_log_probs
from tools.bench.gpus import require_gpus

VOCAB_SIZE, NUM_PLACES = 151_936, 8192
HIDDEN_SIZES = (896, 1536, 3584, 4096)
NUM_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Inputs:
    hidden_NH: Tensor
    weight_VH: Tensor
    token_ids_N: Tensor
    temperature_N: Tensor
    grad_N: Tensor

    @classmethod
    def random(cls, hidden_size: int) -> "Inputs":
        torch.manual_seed(0)
        weight_VH = torch.randn(VOCAB_SIZE, hidden_size, device="cuda").mul_(2 * hidden_size**-0.5).bfloat16()
        return cls(
            torch.randn(NUM_PLACES, hidden_size, device="cuda").bfloat16().requires_grad_(),
            weight_VH.requires_grad_(),
            torch.randint(VOCAB_SIZE, (NUM_PLACES,), device="cuda"),
            torch.ones(NUM_PLACES, device="cuda"),
            torch.randn(NUM_PLACES, device="cuda") / NUM_PLACES,
        )


def ours(inputs: Inputs) -> None:
    _score(inputs, inputs.weight_VH).backward(inputs.grad_N)


def ours_frozen(inputs: Inputs) -> None:
    _score(inputs, inputs.weight_VH.detach()).backward(inputs.grad_N)


@torch.no_grad()
def ours_scoring(inputs: Inputs) -> None:
    _score(inputs, inputs.weight_VH)


def _score(inputs: Inputs, weight_VH: Tensor) -> Tensor:
    log_probs_N, _ = token_log_probs(inputs.hidden_NH, weight_VH, inputs.token_ids_N, temperature_N=inputs.temperature_N)
    return log_probs_N


def plain(inputs: Inputs) -> None:
    logits_NV = torch.nn.functional.linear(inputs.hidden_NH, inputs.weight_VH) / inputs.temperature_N.bfloat16().unsqueeze(-1)
    all_log_probs_NV = torch.log_softmax(logits_NV, dim=-1, dtype=torch.float32)
    all_log_probs_NV.gather(-1, inputs.token_ids_N.unsqueeze(-1)).squeeze(-1).backward(inputs.grad_N)


@torch.no_grad()
def products(inputs: Inputs) -> None:
    """The logits in float32, twice, and both gradients from logits' gradients in bfloat16."""
    for _ in range(2):
        logits_NV = torch.mm(inputs.hidden_NH, inputs.weight_VH.T, out_dtype=torch.float32)
    # Random numbers, because products of zeros may run faster.
    grad_NV = logits_NV.view(torch.bfloat16)[:, :VOCAB_SIZE]
    torch.mm(grad_NV, inputs.weight_VH)
    torch.mm(grad_NV.T, inputs.hidden_NH)


def measure(way: Callable[[Inputs], None], inputs: Inputs) -> dict[str, float]:
    gradients = (inputs.hidden_NH, inputs.weight_VH)
    took, peak_bytes = [], 0
    for round_ in range(NUM_ROUNDS + 3):
        for tensor in gradients:
            tensor.grad = None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        start.record()
        way(inputs)
        end.record()
        torch.cuda.synchronize()
        if round_ >= 3:
            took.append(start.elapsed_time(end))
            weight_grad = inputs.weight_VH.grad
            kept_bytes = before_bytes + (0 if weight_grad is None else weight_grad.nbytes)
            peak_bytes = max(peak_bytes, torch.cuda.max_memory_allocated() - kept_bytes)
    return {"ms": round(statistics.median(took), 2), "ms_worst": round(max(took), 2), "gib": round(peak_bytes / 2**30, 3)}


WAYS: dict[str, Callable[[Inputs], None]] = {
    "products": products,
    "plain": plain,
    "ours": ours,
    "ours frozen": ours_frozen,
    "ours scoring": ours_scoring,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-sizes", nargs="+", type=int, default=list(HIDDEN_SIZES))
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args()
    require_gpus()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for hidden_size in arguments.hidden_sizes:
        inputs = Inputs.random(hidden_size)
        results[str(hidden_size)] = {name: measure(way, inputs) for name, way in WAYS.items()}
        for name, figures in results[str(hidden_size)].items():
            print(f"H {hidden_size:5d}  {name:13s} {figures['ms']:8.2f} ms {figures['gib']:7.3f} GiB", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "by_hidden_size": results}
    (arguments.out / "lm_head_gpu.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
