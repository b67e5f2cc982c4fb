"""Keys of earlier versions and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasuki.wire.errors import InvalidArgument

_DERIVED = "follows from coordinator.stage_timeout_s: set that, or remove it"
_DECIDED = "is gone, since there is one way left: remove it"
_FIXED = "is gone: remove it"
_PLANNED = "is gone, since the planner decides: remove it"
_LISTEN = (
    'is now listen = "HOST:PORT", at the top of the file, for the coordinator; trainer and rollout have the next two ports'
)
_SEED = "is now seed, at the top of the file"
_THREADS = "is gone: start the node with OMP_NUM_THREADS"
_OF_POLICY = ("betas", "eps", "weight_decay", "max_grad_norm", "lr_schedule", "warmup_steps", "total_steps")
REPLACED: Mapping[str, str] = {
    **dict.fromkeys((f"{service}.listen" for service in ("coordinator", "trainer", "rollout")), _LISTEN),
    "failpoints": "is now the environment variable TASUKI_FAILPOINTS",
    "unsafe": "is gone: set the environment variable TASUKI_FAILPOINTS",
    "telemetry.endpoint": "is now the environment variable OTEL_EXPORTER_OTLP_ENDPOINT",
    "telemetry.headers_file": "is now the environment variable TASUKI_OTLP_HEADERS_FILE",
    "telemetry": "is gone: remove the table; docs/guides/tracing.md names the environment variables",
    "coordinator.recovery_timeout_s": _DERIVED,
    "fleet.node_timeout_s": "is always 30 s: remove it",
    "model.preload": "is decided by the file system of model.path (docs/design/start-up.md): remove it",
    "memory.pool": _DECIDED,
    "metrics.engine": "is now rollout.engine.enable_metrics",
    "residency": _PLANNED,
    "restart.progress_s": _DERIVED,
    "restart.stall_s": _DERIVED,
    "restart.window_s": "is always ten minutes: remove it",
    "rollout.attention_backend": "is now rollout.engine.attention_backend",
    "rollout.float32_logits": "is always on: remove it",
    "rollout.full_read_back": _DECIDED,
    "rollout.kv_growth": _DECIDED,
    "rollout.kv_tokens": "is gone: the planner decides, or a number is now rollout.engine.max_total_tokens",
    "rollout.num_threads": _THREADS,
    "rollout.radix_cache": "= false is now rollout.engine.disable_radix_cache = true",
    "rollout.sampling_backend": "is now rollout.engine.sampling_backend",
    "rollout.seed": _SEED,
    "security.roles": "is now the table [certificates] of the file security.callers",
    "security.tokens": "is now the table [tokens] of the file security.callers, a line a token: docs/guides/ports.md",
    "sft.seed": _SEED,
    "track.online": "is now the environment variable WANDB_MODE=online",
    "train.advantages.kl_estimator": "is always k1 in the reward: remove it",
    "train.loss.aggregation_length": "is always train.max_new_tokens: remove it",
    "train.advantages.kl_horizon": "is always 10000 samples: remove it",
    "train.eval.correct_at": "is always 1: scale the reward, or remove it",
    "train.eval.top_k": "is gone: use train.eval.top_p, or remove it",
    "train.keep_optimizer": "is gone: a run begins with a new optimizer state; remove it",
    "rollout.start_timeout_s": _DERIVED,
    "train.samples.max_bytes": "is always 256 MB: remove it",
    **dict.fromkeys((f"trainer.critic.{key}" for key in _OF_POLICY), "is the policy's: remove it"),
    "trainer.critic.lora": "is now trainer.critic.lora_rank",
    "trainer.collective_timeout_s": _DERIVED,
    "trainer.export": _PLANNED,
    "trainer.export_handles": _DECIDED,
    "trainer.export_stays": _PLANNED,
    "trainer.lora.share_base": _PLANNED,
    "trainer.num_threads": _THREADS,
    "trainer.publish_deltas": _DECIDED,
    "train.reward.functions": 'is now train.reward.function = { NAME = "module:function" }, with weights = { NAME = 0.2 }',
    "train.seed": _SEED,
    "trainer.total_steps": "is the run's num_steps: remove it",
    "trainer.kept_layers": "is the planner's choice: remove it",
    "trainer.optimizer_8bit": '= true is now trainer.moments = "8bit"',
    "trainer.optimizer_on_host": '= true is now trainer.moments = "host"',
    "trainer.empty_cache_early": _FIXED,
    "trainer.reshard_after_forward": _FIXED,
    "trainer.seed": _SEED,
}


def check_replaced(table: Mapping[str, Any]) -> None:
    """Raises InvalidArgument naming the first key that is gone."""
    for key, instead in REPLACED.items():
        at: Any = table
        for part in key.split("."):
            at = at.get(part) if isinstance(at, Mapping) else None
        if at is not None:
            raise InvalidArgument(key, instead)
