"""Facts about a model needed before the engine loads it, read from config.json before heavy imports."""

from dataclasses import dataclass

from tasuki.config.checks import replays_routes
from tasuki.config.schema import NodeConfig
from tasuki.models import rope
from tasuki.models.config_json import architecture_of, read_json_object
from tasuki.models.family import Model
from tasuki.models.images import ImageProcessor
from tasuki.models.known import read_model_file
from tasuki.models.routes import RouteShape
from tasuki.models.tokenizer import read_stop_token_ids
from tasuki.wire.errors import InvalidArgument

NEXT = "Qwen3NextForCausalLM"
UNROTATED = "SmolLM3ForCausalLM"
"""Served as a Llama, see sglang/models.py."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as configured for this service."""

    path: str
    architecture: str
    """SGLang's name of it."""
    vocab_size: int
    context_length: int
    """Maximum prompt plus completion."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion unless the request ignores them: every end-of-sequence token in the model folder."""
    is_seeded: bool
    """Whether every request is sampled with its own seed."""
    is_speculative: bool = False
    """Whether the engine drafts tokens and verifies them."""
    images: ImageProcessor | None = None
    """None if the model reads text alone."""
    routes: RouteShape | None = None
    """What the engine reports of the experts of each token."""
    full_attention_interval: int | None = None
    """With gated delta nets, of which each request has states: every layer of this number has full attention instead."""
    rope_theta: float | None = None
    """Base of rotary embeddings, where the engine would not find it in `rope_parameters`."""


def read_model(config: NodeConfig) -> ModelFacts:
    """Reads what `check_model_folders` has judged. Raises as read_model_file and read_stop_token_ids."""
    path, model = config.model.path, read_model_file(config.model.path)
    shape, wanted = model.shape, config.rollout.context_length
    table = read_json_object(path / "config.json", field="model.path")
    architecture = architecture_of(table)
    return ModelFacts(
        path=str(path),
        architecture="LlamaForCausalLM" if architecture == UNROTATED else architecture,
        vocab_size=shape.vocab_size,
        context_length=shape.context_length if wanted is None else wanted,
        stop_token_ids=read_stop_token_ids(path, vocab_size=shape.vocab_size),
        is_seeded=config.device == "cpu",
        is_speculative="speculative_algorithm" in config.rollout.engine,
        images=None if shape.tower is None else ImageProcessor(path, shape.tower, vocab_size=shape.vocab_size),
        routes=RouteShape.of(shape) if replays_routes(config, shape) else None,
        full_attention_interval=_full_attention_interval(model),
        rope_theta=next(rope.bases(table), 10000.0) if architecture == NEXT else None,
    )


def _full_attention_interval(model: Model) -> int | None:
    depth, delta = model.shape.num_layers, model.shape.delta
    if delta is None:
        return None
    return next((layer + 1 for layer in range(depth) if layer not in delta.layers), depth + 1)


def check_capacity(total_tokens: int, model: ModelFacts) -> None:
    """Raises InvalidArgument if a KV cache of `total_tokens` cannot hold one sequence of maximum length."""
    if total_tokens < model.context_length:
        raise InvalidArgument(
            "rollout.kv_ratio",
            f"a KV cache of {total_tokens} tokens cannot hold one sequence of {model.context_length}; "
            "raise it, or lower rollout.context_length",
            needed_tokens=model.context_length,
            total_tokens=total_tokens,
        )
