"""Our arenas in the place of SGLang's memory saver: SGLang says what it makes for which tag, and pages move by our commands alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, cast

import torch
from sglang.srt.model_executor.runner_utils import pool as graph_pool
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from tasuki.memory.allocator import NativeAllocator
from tasuki.memory.tags import MemoryTag
from tasuki.wire.errors import InternalError


def install_saver(allocator: NativeAllocator) -> None:
    """From now on what SGLang makes for a tag lies in the allocator's arena. To be called before the engine is built."""
    saver = ArenaSaver(allocator)
    TorchMemorySaverAdapter.create = cast(Any, staticmethod(lambda enable: saver))
    if MemoryTag.CUDA_GRAPH in allocator.tags:
        # Of all graph backends, with or without a saver; what a capture allocates then sleeps with the tag.
        graph_pool.set_global_graph_memory_pool(allocator.cuda_regions().pool(MemoryTag.CUDA_GRAPH).id)


class ArenaSaver(TorchMemorySaverAdapter):
    """SGLang's interface to pausable memory."""

    def __init__(self, allocator: NativeAllocator) -> None:
        self._allocator = allocator

    @property
    def enabled(self) -> bool:
        return True

    def configure_subprocess(self) -> AbstractContextManager[None]:
        """Without the library that torch_memory_saver would preload."""
        return nullcontext()

    def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager[None]:
        return self._allocator.region(MemoryTag(tag))

    @contextmanager
    def cuda_graph(self, *, tag: str, cuda_graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
        options["pool"] = self._allocator.cuda_regions().pool(tag).id
        with torch.cuda.graph(cuda_graph, **options):
            yield

    def disable(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pause(self, tag: str) -> NoReturn:
        """SGLang's own calls for this end the engine when they come twice; see rank_commands.py for ours."""
        raise InternalError(f"{tag} is paused by the rollout service, not by SGLang")

    def resume(self, tag: str) -> NoReturn:
        raise InternalError(f"{tag} is resumed by the rollout service, not by SGLang")
