"""Our arenas in place of SGLang's memory saver: SGLang tags its allocations, and only our commands move pages."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, cast

import torch
from sglang.srt.model_executor.runner_utils import pool as graph_pool
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from tasuki.memory.arena import NativeAllocator
from tasuki.wire.errors import InternalError
from tasuki.wire.stages import MemoryTag


def install_saver(allocator: NativeAllocator) -> None:
    """Places SGLang's tagged allocations in the allocator's arenas. Must be called before the engine is built."""
    saver = ArenaSaver(allocator)
    TorchMemorySaverAdapter.create = cast(Any, staticmethod(lambda enable: saver))
    if MemoryTag.CUDA_GRAPH in allocator.tags:
        # Used by every graph backend, with or without a saver; what a capture allocates is then paused with the tag.
        graph_pool.set_global_graph_memory_pool(allocator.cuda_regions().pool(MemoryTag.CUDA_GRAPH).id)


class ArenaSaver(TorchMemorySaverAdapter):
    """SGLang's interface to pausable memory."""

    def __init__(self, allocator: NativeAllocator) -> None:
        self._allocator = allocator

    @property
    def enabled(self) -> bool:
        return True

    def configure_subprocess(self) -> AbstractContextManager[None]:
        """Skips the library that torch_memory_saver would preload."""
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
        """Refuses: SGLang's own calls end the engine if repeated; rank.py has ours."""
        raise InternalError(f"{tag} is paused by the rollout service, not by SGLang")

    def resume(self, tag: str) -> NoReturn:
        raise InternalError(f"{tag} is resumed by the rollout service, not by SGLang")
