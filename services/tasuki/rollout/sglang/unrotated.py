"""SmolLM3 in SGLang, which has no model of it: a Llama, some of whose layers rotate nothing."""

import functools
from typing import Any

from torch import Tensor, nn


class Unrotated(nn.Module):
    """Takes the place of a layer's rotary embedding."""

    def forward(self, positions: Tensor, query: Tensor, key: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return query, key


def install_unrotated() -> None:
    """Makes Llama's layers of this process follow `no_rope_layers` of config.json. Call it before the model is built."""
    from sglang.srt.models import llama

    attention: Any = llama.LlamaAttention
    build = attention.__init__

    @functools.wraps(build)
    def built(self: Any, config: Any, *args: Any, layer_id: int = 0, **options: Any) -> None:
        build(self, config, *args, layer_id=layer_id, **options)
        if not config.no_rope_layers[layer_id]:
            self.rotary_emb = Unrotated()

    attention.__init__ = built
