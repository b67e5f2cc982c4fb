"""Bytes that autograd keeps for backward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept_bytes(shared: Iterable[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Bytes kept for backward inside the block, by storage; those of `shared`, such as weights, do not count."""
    known = {tensor.untyped_storage().data_ptr() for tensor in shared}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
