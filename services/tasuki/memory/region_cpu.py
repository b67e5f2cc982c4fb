"""A region on a CPU: while it is open, new storages of this thread lie in an arena instead of the heap."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from tasuki.memory.arena import Arena

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
