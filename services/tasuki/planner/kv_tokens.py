"""Tokens in a replica's KV cache: what a step's samples need, as many as fit, or a number."""

from __future__ import annotations

from tasuki.config.schema import NodeConfig

CPU_TOKENS = 32_768
"""Default on a CPU, where `kv_ratio` bounds nothing; more for longer sequences."""
# SGLang reserves a slot ahead of the current token, and our engine a few more (rollout/arguments.py).
_SLACK = 8


def wanted_tokens(config: NodeConfig, *, context_length: int) -> int | None:
    """Tokens of one replica's cache; None means what `kv_ratio` leaves of a GPU.

    context_length: maximum sequence length; the cache holds at least one such sequence.
    """
    wish = config.rollout.kv_tokens
    if isinstance(wish, int):
        return wish
    most = max(CPU_TOKENS, context_length) if config.device == "cpu" else None
    if wish == "most" or (wish is None and longest_sample(config) is None):
        return most
    needed = needed_tokens(config, context_length=context_length)
    return most if needed is None else needed if most is None else min(needed, most)


def needed_tokens(config: NodeConfig, *, context_length: int) -> int | None:
    """Tokens of all samples of a step on one replica at maximum length; None without [train]."""
    if config.train is None:
        return None
    num_samples = config.train.prompts_per_step * config.train.group_size
    at_once = -(-num_samples // config.dp_size)
    if config.rollout.max_running_requests is not None:
        at_once = min(at_once, config.rollout.max_running_requests)
    longest = longest_sample(config)
    longest = context_length if longest is None else min(longest, context_length)
    return max(at_once * (longest + _SLACK), context_length)


def longest_sample(config: NodeConfig) -> int | None:
    """Maximum tokens of prompt plus completion, as far as configured; else None."""
    train, limit = config.train, config.rollout.context_length
    if train is None or train.max_prompt_tokens is None:
        return None if train is None else limit
    longest = train.max_prompt_tokens + train.max_new_tokens
    return longest if limit is None else min(longest, limit)
