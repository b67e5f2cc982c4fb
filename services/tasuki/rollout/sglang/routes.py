"""Routes in one byte, or two above 256 experts: SGLang keeps, copies and sends int32, and pins host memory on a CPU, too.

SGLang's buffers are indexed by a token's slot in the KV cache, so that cached prefixes have theirs; a pause of the cache forgets both.
"""

from typing import Any

import torch

from tasuki.models.routes import RouteShape
from tasuki.models.shape import ModelShape


def install_routes(model: ModelShape, *, device: str) -> None:
    """Makes SGLang's buffers of this process narrow; nothing for a dense model."""
    if (routes := RouteShape.of(model)) is None:
        return
    from sglang.srt.state_capturer import base

    dtype = torch.uint8 if routes.dtype.itemsize == 1 else torch.int16

    class HostRoutes(base.BaseHostCache):
        def __init__(self, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
            shape = num_tokens, num_layers, topk_size
            self.num_tokens, self.num_layers, self.topk_size, self.name = *shape, name
            self.buffer = torch.zeros(shape, dtype=dtype, pin_memory=device == "cuda")

    class DeviceRoutes(base.BaseDeviceCache):
        def __init__(self, max_batch_size: int, num_layers: int, topk_size: int, device: str, name: str) -> None:
            self.num_layers, self.topk_size, self.name = num_layers, topk_size, name
            self.buffer = torch.zeros((max_batch_size, num_layers, topk_size), dtype=dtype, device=device)

    base.BaseHostCache, base.BaseDeviceCache = HostRoutes, DeviceRoutes
    if model.architecture == "MixtralForCausalLM":
        _name_layers()


def _name_layers() -> None:
    """Tells Mixtral's choice of experts its layer, which SGLang 0.5.17 does not: the engine ends when it keeps the first routes."""
    from sglang.srt.models import mixtral

    create = mixtral.MixtralMoE.__init__

    def named(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        self.topk.layer_id = self.experts.layer_id

    mixtral.MixtralMoE.__init__ = named
