"""Breakdown of a GPU's time: kernels of a profiled block by group, and the time that no other kernel hides."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# The first group whose name occurs in the kernel's name counts.
_GROUPS = {
    "NCCL": r"nccl",
    "attention": r"flash|fmha|attn",
    "optimizer": r"multi_tensor|FusedAdam|lpnorm",
    "copies": r"memcpy|memset|direct_copy|copy_kernel|CatArray|chunk_cat|split_with_sizes|fill",
    "vocabulary": r"^_fold|^_gradient",
    "GEMM": r"nvjet|gemm|cublas|cutlass|xmma|splitK",
    "norms": r"layer_norm|rms_norm|LayerNorm|RMSNorm|GammaBeta|RowwiseMoments",
    "pointwise": r"",
}
_NUM_DEAREST = 15


class Kernel(NamedTuple):
    """One run on the device; times in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Seconds of one device."""

    span: float
    """From the first kernel's start to the last one's end."""
    idle: float
    """Part of the span without any kernel."""
    exposed_nccl: float
    """Part of the span in which only NCCL kernels run."""
    groups: Mapping[str, float]
    """Sums over kernels, which may overlap."""
    dearest: Mapping[str, float]
    """The kernels with the largest sums, by name."""


def kernel_times(kernels: Iterable[Kernel]) -> KernelTimes:
    """Returns the breakdown; needs at least one kernel."""
    runs = sorted(kernels, key=lambda kernel: kernel.start)
    groups: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for kernel in runs:
        groups[group_of(kernel.name)] += kernel.end - kernel.start
        names[kernel.name[:120]] += kernel.end - kernel.start
    span = max(kernel.end for kernel in runs) - runs[0].start
    busy = _covered(runs)
    return KernelTimes(
        span=span,
        idle=span - busy,
        exposed_nccl=busy - _covered(kernel for kernel in runs if group_of(kernel.name) != "NCCL"),
        groups=_descending(groups),
        dearest=dict(list(_descending(names).items())[:_NUM_DEAREST]),
    )


def group_of(name: str) -> str:
    return next(group for group, pattern in _GROUPS.items() if re.search(pattern, name, re.IGNORECASE))


@contextmanager
def profiled() -> Iterator[list[Kernel]]:
    """Yields a list that holds the kernels of the block once the block has ended."""
    kernels: list[Kernel] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield kernels
        torch.cuda.synchronize()
    # Building torch's own events takes Python a minute per step; the raw records are read instead.
    results: Any = profile.profiler
    for event in results.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            start = event.start_ns() / 1e9
            kernels.append(Kernel(event.name(), start, start + event.duration_ns() / 1e9))


def _covered(ascending: Iterable[Kernel]) -> float:
    """Seconds during which at least one of the kernels runs."""
    covered, reached = 0.0, float("-inf")
    for kernel in ascending:
        covered += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return covered


def _descending(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in sorted(seconds.items(), key=lambda item: -item[1])}
