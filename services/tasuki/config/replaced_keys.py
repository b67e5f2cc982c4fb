"""Keys of earlier versions and of other libraries, and what to write instead."""

from collections.abc import Mapping
from typing import Any

from tasuki.wire.errors import InvalidArgument

_LISTEN = (
    'is now listen = "HOST:PORT", at the top of the file, for the coordinator; trainer and rollout have the next two ports'
)
_SEED = "is now seed, at the top of the file"
_THREADS = "is gone: start the node with OMP_NUM_THREADS"
_GONE = """
coordinator.recovery_timeout_s fleet.node_timeout_s memory.pool model.preload residency restart.progress_s restart.stall_s
restart.window_s rollout.float32_logits rollout.full_read_back rollout.kv_growth rollout.start_timeout_s
train.advantages.kl_estimator train.advantages.kl_horizon train.keep_optimizer train.loss.aggregation_length
train.samples.max_bytes trainer.collective_timeout_s trainer.critic.betas trainer.critic.eps trainer.critic.lr_schedule
trainer.critic.max_grad_norm trainer.critic.total_steps trainer.critic.warmup_steps trainer.critic.weight_decay
trainer.empty_cache_early trainer.export trainer.export_handles trainer.export_stays trainer.kept_layers
trainer.lora.share_base trainer.publish_deltas trainer.reshard_after_forward trainer.total_steps
"""
REPLACED: Mapping[str, str] = {
    **dict.fromkeys(_GONE.split(), "is gone: tasuki decides it, or it is always the same; remove it"),
    **dict.fromkeys((f"{service}.listen" for service in ("coordinator", "trainer", "rollout")), _LISTEN),
    **dict.fromkeys(("rollout.seed", "sft.seed", "train.seed", "trainer.seed"), _SEED),
    **dict.fromkeys(("rollout.num_threads", "trainer.num_threads"), _THREADS),
    "failpoints": "is now the environment variable TASUKI_FAILPOINTS",
    "unsafe": "is gone: set the environment variable TASUKI_FAILPOINTS",
    "telemetry.endpoint": "is now the environment variable OTEL_EXPORTER_OTLP_ENDPOINT",
    "telemetry.headers_file": "is now the environment variable TASUKI_OTLP_HEADERS_FILE",
    "telemetry": "is gone: remove the table; docs/guides/tracing.md names the environment variables",
    "metrics.engine": "is now rollout.engine.enable_metrics",
    "rollout.attention_backend": "is now rollout.engine.attention_backend",
    "rollout.kv_tokens": "is gone: the planner decides, or a number is now rollout.engine.max_total_tokens",
    "rollout.radix_cache": "= false is now rollout.engine.disable_radix_cache = true",
    "rollout.sampling_backend": "is now rollout.engine.sampling_backend",
    "security.roles": "is now the table [certificates] of the file security.callers",
    "security.tokens": "is now the table [tokens] of the file security.callers, a line a token: docs/guides/ports.md",
    "track.online": "is now the environment variable WANDB_MODE=online",
    "train.eval.correct_at": "is always 1: scale the reward, or remove it",
    "train.eval.top_k": "is gone: use train.eval.top_p, or remove it",
    "trainer.critic.lora": "is now trainer.critic.lora_rank",
    "train.reward.functions": 'is now train.reward.function = { NAME = "module:function" }, with weights = { NAME = 0.2 }',
    "trainer.optimizer_8bit": '= true is now trainer.moments = "8bit"',
    "trainer.optimizer_on_host": '= true is now trainer.moments = "host"',
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
        "trainer.lora.dropout": "lora_dropout",
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
