"""SGLang's parts are imported after our kernels."""

import tasuki.rollout.sglang  # noqa: F401
