"""Routes: the experts that each token passes, as rollout reports them and the trainer replays them.

A row has the experts of one token: those of the first layer, best first, then those of the next.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from tasuki.models.shape import ModelShape

Routes = NDArray[np.uint8 | np.int16]


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The routes of a model's tokens."""

    num_layers: int
    experts_per_token: int
    num_experts: int
    sparse_layers: tuple[int, ...]
    """Dense layers have entries, too, without meaning."""

    @classmethod
    def of(cls, model: ModelShape) -> "RouteShape | None":
        """None without experts."""
        sparse = tuple(filter(model.is_sparse, range(model.num_layers)))
        return cls(model.num_layers, model.experts_per_token, model.num_experts, sparse) if sparse else None

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.int16]:
        return np.dtype(np.uint8) if self.num_experts <= 256 else np.dtype("<i2")

    @property
    def width(self) -> int:
        return self.num_layers * self.experts_per_token

    @property
    def token_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def read(self, content: bytes) -> Routes:
        """[tokens, layers * experts of a token]. content: of whole tokens."""
        rows: Routes = np.frombuffer(content, self.dtype)
        return rows.reshape(-1, self.width)

    def fault(self, routes: Routes) -> tuple[int, str] | None:
        """The first token with a route that no router could choose, and why; None if there is none."""
        by_layer = routes.reshape(-1, self.num_layers, self.experts_per_token)[:, self.sparse_layers]
        # So that comparisons run over contiguous memory: a call may have a billion of them.
        experts = np.ascontiguousarray(by_layer.reshape(-1, self.experts_per_token).T)
        if experts.max(initial=0) >= self.num_experts or experts.min(initial=0) < 0:
            is_outside = (experts < 0) | (experts >= self.num_experts)
            place = int(is_outside.any(axis=0).argmax())
            found = experts[is_outside[:, place], place][0]
            return self._place(place, f"has expert {found}", f"; the model has {self.num_experts}")
        for one, other in combinations(experts, 2):
            if (is_doubled := one == other).any():
                place = int(is_doubled.argmax())
                return self._place(place, f"has expert {one[place]} twice", "")
        return None

    def _place(self, place: int, problem: str, limit: str) -> tuple[int, str]:
        token, layer = divmod(place, len(self.sparse_layers))
        return token, f"{problem} in layer {self.sparse_layers[layer]}{limit}"
