"""Replays results of operators when a layer is recomputed in backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

Contexts = tuple[TorchDispatchMode, TorchDispatchMode]


class Results(Protocol):
    """Keeps results of operators of one layer, in order."""

    def put(self, tensors: Sequence[Tensor]) -> None: ...

    def take(self) -> Sequence[Tensor]: ...


class OnDevice:
    """Implements Results where they are."""

    def __init__(self) -> None:
        self._results: deque[Sequence[Tensor]] = deque()

    def put(self, tensors: Sequence[Tensor]) -> None:
        self._results.append(tensors)

    def take(self) -> Sequence[Tensor]:
        return self._results.popleft()


def replaying(results_of: Callable[[], Mapping[OpOverload, Results]]) -> Callable[[], Contexts]:
    """`context_fn` of a checkpoint that keeps the results of some operators. results_of: called once per forward pass of a layer."""

    def contexts() -> Contexts:
        results, others = results_of(), deque[tuple[Any, list[Any]]]()
        return _Keeping(results, others), _Replaying(results, others)

    return contexts


class _Mode(TorchDispatchMode):
    def __init__(self, results: Mapping[OpOverload, Results], others: deque[tuple[Any, list[Any]]]) -> None:
        """others: structure of each result, and what is in it besides tensors."""
        super().__init__()
        self._results, self._others = results, others

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Says that compiled graphs run inside: kept operators are outside of them."""
        return True


class _Keeping(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._results:
            leaves, structure = tree_flatten(result)
            # Autograd sets the history of a result on the tensor itself.
            self._results[func].put([leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)])
            self._others.append((structure, [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]))
        return result


class _Replaying(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._results:
            return func(*args, **(kwargs or {}))
        structure, others = self._others.popleft()
        tensors = iter(self._results[func].take())
        return tree_unflatten([next(tensors) if other is None else other[0] for other in others], structure)
