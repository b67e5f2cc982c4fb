"""Vision towers: names and shapes of their parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from tasuki.models.config_json import Config, elements, number, size, unsupported
from tasuki.wire.errors import InvalidArgument

TOWER = "visual."
"""Start of the names of a tower's parameters in the trainer's module."""
_EPSILON = 1e-6
_ACTIVATION = "gelu_pytorch_tanh"
_SIZES = frozenset({
    "depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "temporal_patch_size", "in_channels", "spatial_merge_size",
    "num_position_embeddings", "out_hidden_size", "deepstack_visual_indexes",
})  # fmt: skip
# Keys without effect on the tower. transformers writes the rest of its common ones.
_NOTES = frozenset({
    "architectures", "hidden_act", "model_type", "initializer_range", "dtype", "torch_dtype", "transformers_version", "return_dict",
    "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "output_attentions", "output_hidden_states", "problem_type",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Sizes of a vision transformer that turns patches of pixels into embeddings, one for each square of patches."""

    image_token_id: int
    """Token of a prompt that stands for an embedding."""
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_shape: tuple[int, int, int, int]
    """Channels, frames, rows and columns of a patch."""
    merge_size: int
    """Rows and columns of a square of patches."""
    num_positions: int
    """Learned positions, of a square grid that is interpolated."""
    out_size: int
    """Size of an embedding: the text's hidden size."""
    deepstack: tuple[int, ...]
    """Blocks whose outputs are also embedded, and added to the text's hidden states after its first layers."""

    def parameters(self) -> dict[str, tuple[int, ...]]:
        hidden, inner, merged = self.hidden_size, self.intermediate_size, self.hidden_size * self.merge_size**2
        shapes: dict[str, tuple[int, ...]] = {
            "patch_embed.proj.weight": (hidden, *self.patch_shape),
            "patch_embed.proj.bias": (hidden,),
            "pos_embed.weight": (self.num_positions, hidden),
        }
        for index in range(self.depth):
            block = f"blocks.{index}."
            shapes |= {f"{block}{norm}.{kind}": (hidden,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")}
            shapes |= _linear(f"{block}attn.qkv", 3 * hidden, hidden) | _linear(f"{block}attn.proj", hidden, hidden)
            shapes |= _linear(f"{block}mlp.linear_fc1", inner, hidden) | _linear(f"{block}mlp.linear_fc2", hidden, inner)
        for index, merger in enumerate(("merger", *(f"deepstack_merger_list.{place}" for place in range(len(self.deepstack))))):
            width = merged if index else hidden
            shapes |= {f"{merger}.norm.weight": (width,), f"{merger}.norm.bias": (width,)}
            shapes |= _linear(f"{merger}.linear_fc1", merged, merged) | _linear(f"{merger}.linear_fc2", self.out_size, merged)
        return shapes

    def num_tokens(self, grid: Sequence[int]) -> int:
        """Tokens that stand for an image of `grid` patches: frames, rows, columns."""
        frames, rows, columns = grid
        return int(frames) * int(rows) * int(columns) // self.merge_size**2


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def read_tower(config: Config, *, out_size: int) -> Tower | None:
    """The tower of a text model's config.json with `vision_config` and `image_token_id` beside the text's keys; None without.

    out_size: the text's hidden size. Raises UnsupportedModel naming a key that changes the tower or has an unknown effect, InvalidArgument
    naming a missing or invalid one.
    """
    vision = config.get("vision_config")
    if vision is None:
        return None
    if not isinstance(vision, dict):
        raise InvalidArgument("vision_config", "must be a table in the model's config.json")
    vision = {**vision, "architectures": config["architectures"]}
    for key, value in vision.items():
        if key in _NOTES or key.startswith("_"):
            continue
        if key not in _SIZES and value:
            raise unsupported(vision, key, "its effect on the vision tower is unknown; unset it if nothing is computed from it")
    if number(config, "rms_norm_eps", default=_EPSILON) != _EPSILON:
        raise unsupported(
            config,
            "rms_norm_eps",
            f"the engine gives it to the norms of the vision tower, which have {_EPSILON} in transformers",
        )
    if vision.get("hidden_act", _ACTIVATION) != _ACTIVATION:
        raise unsupported(vision, "hidden_act", f"trainer and engine agree on {_ACTIVATION!r} only for the vision tower")
    if (out := size(vision, "out_hidden_size")) != out_size:
        raise InvalidArgument("out_hidden_size", f"is {out}, but the text's hidden_size is {out_size}")
    depth, side = size(vision, "depth"), size(vision, "patch_size")
    deepstack = elements(vision, "deepstack_visual_indexes", of=int) or []
    if deepstack != sorted({each for each in deepstack if 0 <= each < depth}):
        raise InvalidArgument("deepstack_visual_indexes", f"must ascend below depth, {depth}, not {deepstack}")
    return Tower(
        image_token_id=size(config, "image_token_id"),
        depth=depth,
        hidden_size=size(vision, "hidden_size"),
        intermediate_size=size(vision, "intermediate_size"),
        num_heads=size(vision, "num_heads"),
        patch_shape=(size(vision, "in_channels", default=3), size(vision, "temporal_patch_size", default=2), side, side),
        merge_size=size(vision, "spatial_merge_size", default=2),
        num_positions=size(vision, "num_position_embeddings"),
        out_size=out_size,
        deepstack=tuple(deepstack),
    )
