"""Keys of earlier versions and of other libraries, and what to write instead."""

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


OTHERS: Mapping[str, str] = {
    name: own
    for own, names in {
        "model.path": "model_name model_name_or_path",
        "rollout.context_length": "max_model_len max_model_length vllm_max_model_length",
        "rollout.dp_size": "data_parallel_size",
        "rollout.kv_ratio": "gpu_memory_utilization mem_fraction_static vllm_gpu_memory_utilization",
        "rollout.max_running_requests": "max_num_seqs",
        "rollout.tp_size": "tensor_model_parallel_size tensor_parallel_size vllm_tensor_parallel_size",
        "seed": "seed data_seed",
        "track.to": "logger report_to",
        "train.advantages.discount": "gamma",
        "train.algorithm": "adv_estimator advantage_estimator",
        "train.advantages.lam": "lam gae_lambda",
        "train.advantages.std": "norm_adv_by_std_in_grpo scale_rewards",
        "train.dataset, or sft.dataset": "dataset_name train_dataset train_file train_files",
        "train.eval.num_samples": "num_eval_samples",
        "train.eval_dataset, or sft.eval_dataset": "eval_file val_files",
        "train.eval_every, or sft.eval_every": "eval_steps test_freq",
        "train.group_size": "n num_generations num_return_sequences rollout_n",
        "train.loss.aggregation": "loss_agg_mode loss_type",
        "train.loss.clip_high": "clip_eps_high clip_ratio_high cliprange_high epsilon_high",
        "train.loss.clip_low, with clip_high": "clip_eps clip_ratio clip_ratio_low cliprange cliprange_low epsilon epsilon_low",
        "train.loss.dual_clip": "clip_ratio_c delta",
        "train.loss.entropy_coef": "ent_coef entropy_coef entropy_coeff",
        "train.loss.kl_coef": "beta init_kl_coef kl_beta kl_coef kl_loss_coef",
        "train.mask_truncated": "mask_truncated_completions",
        "train.max_new_tokens": "max_completion_length max_response_length max_tokens response_length",
        "train.max_prompt_tokens": "max_prompt_length",
        "train.num_epochs": "num_iterations num_ppo_epochs ppo_epochs",
        "train.num_mini_batches": "num_mini_batches steps_per_generation",
        "train.num_mini_batches, with their number instead of a size": "mini_batch_size ppo_mini_batch_size",
        "train.num_steps, or sft.num_epochs": "epochs max_steps num_train_epochs total_epochs total_steps total_training_steps",
        "train.prompts_per_step, or sft.samples_per_step": "batch_size per_device_train_batch_size rollout_batch_size train_batch_size",
        "train.reward.function": "reward_fn reward_func reward_funcs reward_function reward_functions",
        "train.reward.weights": "reward_weights",
        "train.save_every, or sft.save_every": "save_freq save_interval save_steps",
        "train.temperature": "sampling_temperature",
        "trainer.betas": "adam_beta1 adam_beta2 adam_betas",
        "trainer.checkpointing": "enable_gradient_checkpointing gradient_checkpointing",
        "trainer.compute_dtype": "bf16 dtype fp16 mixed_precision torch_dtype",
        "trainer.learning_rate": "learning_rate lr",
        "trainer.lora.alpha": "lora_alpha",
        "trainer.lora.rank": "lora_r lora_rank r",
        "trainer.lora.target_modules": "lora_target_modules",
        "trainer.lr_schedule": "lr_scheduler lr_scheduler_type scheduler",
        "trainer.max_grad_norm": "clip_grad grad_clip gradient_clipping max_grad_norm",
        "trainer.micro_batch_tokens": "gradient_accumulation_steps micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
        "trainer.moments": "optim optimizer",
        "trainer.num_ranks": "n_gpus n_gpus_per_node num_gpus num_processes",
        "trainer.sequence_parallel": "ulysses_sequence_parallel_size",
        "trainer.warmup_steps": "lr_warmup_steps warmup_ratio warmup_steps",
        "trainer.weight_decay": "weight_decay",
    }.items()
    for name in names.split()
}
"""tasuki's key by a name that TRL, verl or OpenRLHF gives it."""
