"""`sgl_kernel` of an engine on a CPU.

SGLang imports functions of that package's build for CPUs with AMX. The build for CUDA has none of them, and without a driver it cannot be
imported. This module takes its place: a function that an engine of ours calls has a body in torch, and any other raises once it is called.
"""

import sys
from collections.abc import Callable
from typing import NoReturn

from sglang.srt.utils import is_cpu
from torch import Tensor

from tasuki.rollout.sglang.cpu.gated_delta import define_operators


def install_cpu_kernels() -> None:
    """Makes this module `sgl_kernel`, unless the installed one has functions for CPUs. Call it before SGLang's engine is imported."""
    if not is_cpu():
        return
    try:
        import sgl_kernel as installed
    except ImportError:  # needs a CUDA driver
        installed = None
    if not hasattr(installed, assign_req_to_token_pool_cpu.__name__):
        sys.modules["sgl_kernel"] = sys.modules[__name__]
        define_operators()


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Notes the cache slots of each request's new tokens. out_cache_loc: [new tokens of all requests], in order."""
    first = 0
    for request, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[request, start:end] = out_cache_loc[first : first + end - start]
        first += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """A function that SGLang imports with its engine, and that no engine of ours calls, such as those of drafts."""
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} has no body for CPUs in {__name__}, and no engine of tasuki should call it")

    return missing
