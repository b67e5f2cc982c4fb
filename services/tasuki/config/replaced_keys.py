"""Keys of earlier versions and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasuki.wire.errors import InvalidArgument

_DERIVED = "follows from coordinator.stage_timeout_s: set that, or remove it"
_DECIDED = "is gone, since there is one way left: remove it"
_THREADS = "is gone: start the node with OMP_NUM_THREADS"
REPLACED: Mapping[str, str] = {
    "coordinator.recovery_timeout_s": _DERIVED,
    "memory.pool": _DECIDED,
    "metrics.engine": "is now rollout.engine.enable_metrics",
    "restart.progress_s": _DERIVED,
    "restart.stall_s": _DERIVED,
    "restart.window_s": "is always ten minutes: remove it",
    "rollout.attention_backend": "is now rollout.engine.attention_backend",
    "rollout.float32_logits": "is always on: remove it",
    "rollout.kv_growth": _DECIDED,
    "rollout.num_threads": _THREADS,
    "rollout.radix_cache": "= false is now rollout.engine.disable_radix_cache = true",
    "rollout.sampling_backend": "is now rollout.engine.sampling_backend",
    "rollout.seed": "is now seed, at the top of the file",
    "rollout.start_timeout_s": _DERIVED,
    "train.samples.max_bytes": "is always 256 MB: remove it",
    **dict.fromkeys(
        (f"trainer.critic.{key}" for key in ("betas", "eps", "weight_decay", "max_grad_norm")), "is the policy's: remove it"
    ),
    "trainer.collective_timeout_s": _DERIVED,
    "trainer.export_handles": _DECIDED,
    "trainer.num_threads": _THREADS,
    "trainer.publish_deltas": _DECIDED,
    "trainer.seed": "is now seed, at the top of the file",
}


def check_replaced(table: Mapping[str, Any]) -> None:
    """Raises InvalidArgument naming the first key that is gone."""
    for key, instead in REPLACED.items():
        at: Any = table
        for part in key.split("."):
            at = at.get(part) if isinstance(at, Mapping) else None
        if at is not None:
            raise InvalidArgument(key, instead)
