"""From the node's configuration to SGLang's arguments; refuses here what would only fail after half a minute of starting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from tasuki.config.schema import NodeConfig
from tasuki.rollout.environment import architecture_of
from tasuki.rollout.receive import LOADER
from tasuki.wire.errors import InvalidArgument, UnsupportedModel

# SGLang 0.5.15 takes prompts of at most context_length - 7 tokens and ends completions at context_length - 2. We ask for this much more
# and let it be used by nobody, so that a prompt plus max_new_tokens of exactly our context_length works.
_CONTEXT_SLACK = 8
# On a CPU SGLang would take a share of all host memory for the KV cache, and thousands of request slots.
_CPU_TOTAL_TOKENS = 32_768
_CPU_RUNNING_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the service must know of a model before the engine has loaded it."""

    path: str
    architecture: str
    vocab_size: int
    context_length: int
    has_eos: bool
    """Whether the model names an end-of-sequence token."""
    is_seeded: bool
    """Whether every request is sampled by a seed of its own."""


def read_model(config: NodeConfig) -> ModelFacts:
    """Raises PathNotFound without a model folder, UnsupportedModel for a configuration that names no known model, InvalidArgument
    when the context is longer than the model's or than the KV cache, or the heads cannot be split.
    """
    path = config.model.path
    architecture = architecture_of(path)
    try:
        model = AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(f"model.path: {path}/config.json describes no model that transformers knows: {error}") from error
    text = model.get_text_config()
    longest: int = text.max_position_embeddings
    wanted = config.rollout.context_length
    if wanted is not None and wanted > longest:
        raise InvalidArgument("rollout.context_length", f"{wanted} is more than the model's {longest} positions")
    facts = ModelFacts(
        path=str(path),
        architecture=architecture,
        vocab_size=text.vocab_size,
        context_length=longest if wanted is None else wanted,
        has_eos=text.eos_token_id is not None,
        is_seeded=config.device == "cpu",
    )
    check_capacity(config.rollout.max_total_tokens, facts)
    heads: int = text.num_attention_heads
    if heads % config.rollout.tp_size:
        raise InvalidArgument(
            "rollout.tp_size", f"the model's {heads} attention heads cannot be split over {config.rollout.tp_size} ranks"
        )
    return facts


def engine_arguments(config: NodeConfig, model: ModelFacts) -> dict[str, Any]:
    """Keyword arguments of SGLang's Engine."""
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model_path": str(config.model.path),
        "device": config.device,
        "tp_size": rollout.tp_size,
        "dtype": rollout.dtype,
        "context_length": model.context_length + _CONTEXT_SLACK,
        "random_seed": rollout.seed,
        "mem_fraction_static": rollout.kv_ratio,
        # Token ids in, token ids out.
        "skip_tokenizer_init": True,
        "custom_weight_loader": [LOADER],
        # An idle scheduler would otherwise turn in a loop and take a whole core.
        "sleep_on_idle": True,
        "grammar_backend": "none",
        "log_level": "warning",
    }
    if rollout.max_total_tokens is not None:
        arguments["max_total_tokens"] = rollout.max_total_tokens + _CONTEXT_SLACK
    if rollout.max_running_requests is not None:
        arguments["max_running_requests"] = rollout.max_running_requests
    if config.device == "cpu":
        arguments |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
        }
        arguments.setdefault("max_total_tokens", max(_CPU_TOTAL_TOKENS, model.context_length) + _CONTEXT_SLACK)
        arguments.setdefault("max_running_requests", _CPU_RUNNING_REQUESTS)
    return arguments


def check_capacity(total_tokens: int | None, model: ModelFacts) -> None:
    """Raises InvalidArgument when a KV cache of `total_tokens` is too small for one sequence of the full length."""
    if total_tokens is not None and total_tokens < model.context_length:
        raise InvalidArgument(
            "rollout.max_total_tokens",
            f"a KV cache of {total_tokens} tokens cannot hold one sequence of {model.context_length}; "
            "raise it, or lower rollout.context_length",
            needed_tokens=model.context_length,
            total_tokens=total_tokens,
        )
