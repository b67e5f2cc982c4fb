"""Recomputation of a module in backward, without what it keeps."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from tasuki.trainer.modules.routing import Router, routing_operators

Layer = Callable[..., Any]


class Results(Protocol):
    """Keeps results of operators of one layer, in order: on the device a deque."""

    def append(self, tensors: Sequence[Tensor], /) -> None: ...

    def popleft(self) -> Sequence[Tensor]: ...


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
            self._results[func].append([leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)])
            self._others.append((structure, [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]))
        return result


class _Replaying(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._results:
            return func(*args, **(kwargs or {}))
        structure, others = self._others.popleft()
        tensors = iter(self._results[func].popleft())
        return tree_unflatten([next(tensors) if other is None else other[0] for other in others], structure)


def recomputing(module: nn.Module, kept: Iterable[OpOverload] = (), *, results: Callable[[], Results] = deque) -> Layer:
    """Wraps a function of `module` so that backward recomputes it, except the choice of experts and the operators in `kept`.

    results: creates what keeps those operators' results.
    """
    kept, choices = list(kept), routing_operators() if any(isinstance(each, Router) for each in module.modules()) else []

    def contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
        of_operators: dict[OpOverload, Results] = dict.fromkeys(kept, results())
        of_operators |= {choice: deque[Sequence[Tensor]]() for choice in choices}
        others = deque[tuple[Any, list[Any]]]()
        return _Keeping(of_operators, others), _Replaying(of_operators, others)

    # Modules repeat the random numbers of adapters' dropout by themselves.
    recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return partial(recomputed, context_fn=contexts) if kept or choices else recomputed
