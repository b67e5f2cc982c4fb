"""Counts of the torch operators that run in a block."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountedOperators(TorchDispatchMode):
    """Counts how often each operator runs in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[Any] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[function] += 1
        return function(*args, **(kwargs or {}))
