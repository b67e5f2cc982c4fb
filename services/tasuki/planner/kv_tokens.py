"""Tokens in a replica's KV cache: what a step's samples need, as many as fit, or a number."""

from tasuki.config.engine_arguments import MAX_TOKENS, draft_tokens
from tasuki.config.schema import NodeConfig

TOKENS_KEY = f"rollout.engine.{MAX_TOKENS}"
CPU_TOKENS = 32_768
"""Default on a CPU, where `kv_ratio` bounds nothing; more for longer sequences."""
SGLANG_GRAPH_REQUESTS = 256
"""Largest batch with a CUDA graph if we do not say, on GPUs of 60 to 160 GB below TP 4. Larger ones launch each kernel from the host."""
_MOST_GRAPH_REQUESTS = 1024
# SGLang runs at most so many at once, whatever its cache holds.
_MOST_RUNNING_REQUESTS = 4096
# SGLang's limit with speculative decoding if we do not set one.
_SPECULATING_REQUESTS = 48
# SGLang reserves a slot ahead of the current token, and our engine a few more (rollout/arguments.py).
_SLACK = 8


def wanted_tokens(config: NodeConfig, *, context_length: int) -> int | None:
    """Tokens of one replica's cache; None means what `kv_ratio` leaves of a GPU.

    context_length: maximum sequence length; the cache holds at least one such sequence.
    """
    given = config.rollout.engine.get(MAX_TOKENS)
    if isinstance(given, int):
        return given
    most = max(CPU_TOKENS, context_length) if config.device == "cpu" else None
    if longest_sample(config) is None:
        return most
    needed = needed_tokens(config, context_length=context_length)
    return most if needed is None else needed if most is None else min(needed, most)


def needed_tokens(config: NodeConfig, *, context_length: int) -> int | None:
    """Tokens of all samples of a step on one replica at maximum length; None without [train]."""
    at_once = samples_at_once(config)
    if at_once is None:
        return None
    longest = longest_sample(config)
    longest = context_length if longest is None else min(longest, context_length)
    # SGLang reserves two steps of drafts for each request.
    drafts = 2 * draft_tokens(config.rollout.engine)
    return max(at_once * (longest + drafts + _SLACK), context_length)


def samples_at_once(config: NodeConfig) -> int | None:
    """Samples of a step that one replica generates at once; None without [train]."""
    if config.train is None:
        return None
    at_once = -(-config.train.num_running_groups * config.train.group_size // config.dp_size)
    limit = config.rollout.max_running_requests
    return at_once if limit is None else min(at_once, limit)


def running_requests(config: NodeConfig) -> int:
    """Requests that one replica runs at once; without [train] or a limit an estimate."""
    if config.rollout.max_running_requests is not None:
        return config.rollout.max_running_requests
    if config.train is None and draft_tokens(config.rollout.engine):
        return _SPECULATING_REQUESTS
    return min(max(samples_at_once(config) or 0, SGLANG_GRAPH_REQUESTS), _MOST_RUNNING_REQUESTS)


def state_slots(config: NodeConfig) -> int:
    """States of gated delta nets that one replica keeps: of running requests, and of cached prefixes.

    SGLang runs as many requests at once as this has multiples of 3 without a schedule that overlaps, of 5 with one; of 1 without cache.
    """
    per_request = 3 if config.device == "cpu" else 5
    return running_requests(config) * (1 if config.rollout.engine.get("disable_radix_cache") is True else per_request)


def graph_requests(config: NodeConfig) -> int | None:
    """Requests of the largest batch that CUDA graphs are captured for; None leaves it to SGLang, or to [rollout.engine]."""
    at_once = samples_at_once(config)
    if at_once is None or at_once <= SGLANG_GRAPH_REQUESTS or any("cuda_graph" in name for name in config.rollout.engine):
        return None
    return min(at_once, _MOST_GRAPH_REQUESTS)


def longest_sample(config: NodeConfig) -> int | None:
    """Maximum tokens of prompt plus completion, as far as configured; else None."""
    train, limit = config.train, config.rollout.context_length
    if train is None:
        return None
    if train.episode is not None:
        longest = train.episode.max_tokens
    else:
        longest = None if train.max_prompt_tokens is None else train.max_prompt_tokens + train.max_new_tokens
    if longest is None:
        return limit
    return longest if limit is None else min(longest, limit)
