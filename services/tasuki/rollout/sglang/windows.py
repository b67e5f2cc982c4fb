"""Windows of SGLang's Triton attention, as wide for a sampled token as for a prompt's.

While decoding, SGLang leaves out the oldest token of a window (sgl-project/sglang#32087). Delete this when it does not.
"""

import functools
from typing import Any


def install_windows() -> None:
    """Changes the class of this process. Call it before the model is built."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend: Any = TritonAttnBackend
    build = backend.__init__

    @functools.wraps(build)
    def built(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        if self.sliding_window_size is not None and self.sliding_window_size > 0:
            self.sliding_window_size += 1  # a prefill masks by the size that the layer has

    backend.__init__ = built
