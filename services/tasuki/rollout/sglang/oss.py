"""gpt-oss in SGLang: sinks in the engine's dtype, and on a CPU an activation that is not compiled.

SGLang holds sinks in bfloat16 whatever the engine's dtype (models/gpt_oss.py). Delete that part when it does not.
"""

import functools
from typing import Any

import torch


def install_oss(*, device: str | None) -> None:
    """Changes the classes of this process. Call it before the model is built."""
    from sglang.srt.models import gpt_oss

    attention: Any = gpt_oss.GptOssAttention
    build = attention.__init__

    @functools.wraps(build)
    def built(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        if self.sinks.dtype == torch.bfloat16:  # one backend on a GPU needs float32
            self.sinks.data = self.sinks.data.to(torch.get_default_dtype())

    attention.__init__ = built
    if device == "cpu":
        from sglang.srt.layers.moe import fused_moe_native

        native: Any = fused_moe_native
        native.swiglu_gpt_oss_sigmoid_alpha = native.swiglu_gpt_oss_sigmoid_alpha._torchdynamo_orig_callable
