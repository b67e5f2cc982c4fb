"""Regions: while one is open, new storages of this thread lie in an arena: on a CPU by dispatch, on a GPU by a torch MemPool of the tag."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from tasuki.memory.arena import LIBRARY_PATH, NUM_SLOTS, Arena
from tasuki.wire.errors import InvalidArgument

# Smaller storages stay in the heap: they keep their content over a pause and cost next to nothing.
MIN_STORAGE_BYTES = 2048

aten = torch.ops.aten
_EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# What a factory fills its result with, from its arguments. Made in the arena directly, so that a large pool is not built twice.
_FILLS: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    aten.zeros.default: lambda args: 0,
    aten.zeros_like.default: lambda args: 0,
    aten.new_zeros.default: lambda args: 0,
    aten.ones.default: lambda args: 1,
    aten.ones_like.default: lambda args: 1,
    aten.new_ones.default: lambda args: 1,
    aten.full.default: lambda args: args[1],
    aten.full_like.default: lambda args: args[1],
    aten.new_full.default: lambda args: args[2],
}
# torch.tensor([...]) builds its storage before dispatch and passes it here, as the same tensor.
_FRESH_INPUT = {aten.lift_fresh.default}


class Placing(TorchDispatchMode):
    """Puts every storage that an operator has made, and that is not one of its inputs', into `arena`.

    As on a GPU, that is whatever comes into being inside: factories, clones, casts, results of arithmetic. Storages in the arena cannot be
    resized by torch. Other threads are not affected.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if detect_fake_mode() is not None:
            return func(*args, **kwargs)  # DTensor only wants to know what a result would look like
        if any(cls is not torch.Tensor and cls is not torch.nn.Parameter for cls in types):
            return NotImplemented  # a wrapper (DTensor) goes first; its inner tensors come back here
        if (func in _EMPTY or func in _FILLS) and (made := self._make_in_place(func, args, kwargs)) is not None:
            return made
        out = func(*args, **kwargs)
        old = set() if func in _FRESH_INPUT else {_key(tensor) for tensor in _tensors((args, kwargs))}
        moved: dict[int, torch.UntypedStorage] = {}
        return tree_map_only(torch.Tensor, lambda tensor: self._moved(tensor, old, moved), out)

    def _make_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The factory's result built in the arena; None when it belongs elsewhere (another device, too small, not strided)."""
        like = args[0] if args and isinstance(args[0], torch.Tensor) else None
        device = kwargs.get("device") or (like.device if like is not None else torch.device("cpu"))
        layout = kwargs.get("layout") or (like.layout if like is not None else torch.strided)
        if torch.device(device).type != "cpu" or kwargs.get("pin_memory") or layout is not torch.strided:
            return None
        shape = func(*args, **{**kwargs, "device": torch.device("meta")})
        num_bytes = shape.untyped_storage().nbytes()
        if num_bytes < MIN_STORAGE_BYTES:
            return None
        tensor = _over(self._storage(num_bytes), shape)
        return tensor if func in _EMPTY else tensor.fill_(_FILLS[func](args))

    def _moved(self, tensor: torch.Tensor, old: set[int], moved: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if storage.nbytes() < MIN_STORAGE_BYTES or key in old or tensor.is_pinned():
            return tensor
        if key not in moved:
            moved[key] = self._storage(storage.nbytes()).copy_(storage)
        return _over(moved[key], tensor)

    def _storage(self, num_bytes: int) -> torch.UntypedStorage:
        return torch.frombuffer(self._arena.buffer(num_bytes), dtype=torch.uint8).untyped_storage()


def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor over `storage` with the dtype, shape and strides of `like`."""
    tensor = torch.empty(0, dtype=like.dtype)
    return tensor.set_(storage, like.storage_offset(), like.size(), like.stride())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.device.type == "cpu" else 0


def refuse_expandable_segments() -> None:
    """Refuses expandable segments, with which torch maps pages outside the arenas."""
    # What is in force, however it was set: by either environment variable or at run time.
    snapshot: Any = torch.cuda.memory._snapshot()
    if snapshot["allocator_settings"]["expandable_segments"]:
        raise InvalidArgument(
            "PYTORCH_CUDA_ALLOC_CONF",
            "expandable_segments:True lets torch map memory that cannot be paused; remove it (arenas do not fragment as segments do)",
        )


class CudaRegions:
    """Pools of one device. A pool keeps its freed blocks cached; `close` gives them back."""

    def __init__(self, arenas: list[Arena], *, device: str) -> None:
        if len(arenas) > NUM_SLOTS:
            raise InvalidArgument("tags", f"{len(arenas)} tags, at most {NUM_SLOTS}")
        torch.cuda.init()
        refuse_expandable_segments()
        self._device = torch.device(device).index or 0
        self._pools: dict[str, torch.cuda.MemPool] = {}
        self._allocators: list[torch.cuda.memory.CUDAPluggableAllocator] = []
        for slot, arena in enumerate(arenas):
            arena.bind_slot(slot)
            allocator = torch.cuda.memory.CUDAPluggableAllocator(
                str(LIBRARY_PATH), f"tasuki_torch_alloc_{slot}", "tasuki_torch_free"
            )
            self._allocators.append(allocator)  # the pool holds a bare pointer to it
            with torch.cuda.device(self._device):
                self._pools[arena.tag] = torch.cuda.MemPool(allocator.allocator())

    def region(self, tag: str) -> AbstractContextManager[None]:
        return torch.cuda.use_mem_pool(self._pools[tag], device=self._device)

    def pool(self, tag: str) -> torch.cuda.MemPool:
        """Pool for torch.cuda.graph(pool=...), so that allocations of a capture belong to the tag."""
        return self._pools[tag]

    def blocks(self, tag: str) -> list[tuple[int, int]]:
        """Address and bytes of the pool's blocks in use, without what torch rounded them up by."""
        segments: Any = torch.cuda.memory_snapshot()
        pool = tuple(self._pools[tag].id)
        return [
            (block["address"], block["requested_size"])
            for segment in segments
            if segment["device"] == self._device and tuple(segment["segment_pool_id"]) == pool
            for block in segment["blocks"]
            if block["state"] != "inactive"
        ]

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Gives the pools' segments back to their arenas; those with a live tensor stay."""
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for ever, also one that was made inside a region or capture
        self._pools.clear()
        self.empty_cache()
