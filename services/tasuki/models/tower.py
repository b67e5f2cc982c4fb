"""Vision towers: names and shapes of their parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from tasuki.models.config_json import Config, elements, number, size, unsupported
from tasuki.wire.errors import InvalidArgument

TOWER = "visual."
"""Start of the names of a tower's parameters in the trainer's module."""
_EPSILON = 1e-6
_SIZES = (
    "depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "temporal_patch_size", "in_channels", "spatial_merge_size",
    "out_hidden_size",
)  # fmt: skip
_DEEPSTACK = "deepstack_visual_indexes"
_OWN_SIZES = {
    False: (*_SIZES, "num_position_embeddings", _DEEPSTACK),
    True: (*_SIZES, "window_size", "fullatt_block_indexes"),
}
"""Sizes of a tower without and with windows."""
_ACTIVATION = {False: "gelu_pytorch_tanh", True: "silu"}
# Keys without effect on the tower: of videos, names that nobody reads, and transformers' common ones.
_NOTES = frozenset({
    "tokens_per_second", "in_chans", "spatial_patch_size", "architectures", "hidden_act", "model_type", "initializer_range", "dtype",
    "torch_dtype", "transformers_version", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "problem_type",
})  # fmt: skip
# What every tower computes, and transformers writes from 5.19 on.
_ROTATION = ("rope_parameters", {"rope_theta": 10000.0, "rope_type": "axial"})


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
    out_size: int
    """Size of an embedding: the text's hidden size."""
    num_positions: int = 0
    """Learned positions, of a square grid that is interpolated."""
    deepstack: tuple[int, ...] = ()
    """Blocks whose outputs are also embedded, and added to the text's hidden states after its first layers."""
    has_windows: bool = False
    """Whether it is Qwen 2.5's: attention within windows in most blocks, gated MLPs, RMS norms and no learned positions."""

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return self._windowed_parameters() if self.has_windows else self._plain_parameters()

    def _windowed_parameters(self) -> dict[str, tuple[int, ...]]:
        hidden, inner, merged = self.hidden_size, self.intermediate_size, self.hidden_size * self.merge_size**2
        shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (hidden, *self.patch_shape)}
        for index in range(self.depth):
            block = f"blocks.{index}."
            shapes |= {f"{block}{norm}.weight": (hidden,) for norm in ("norm1", "norm2")}
            shapes |= _linear(f"{block}attn.qkv", 3 * hidden, hidden) | _linear(f"{block}attn.proj", hidden, hidden)
            shapes |= _linear(f"{block}mlp.gate_proj", inner, hidden) | _linear(f"{block}mlp.up_proj", inner, hidden)
            shapes |= _linear(f"{block}mlp.down_proj", hidden, inner)
        shapes["merger.ln_q.weight"] = (hidden,)
        return shapes | _linear("merger.mlp.0", merged, merged) | _linear("merger.mlp.2", self.out_size, merged)

    def _plain_parameters(self) -> dict[str, tuple[int, ...]]:
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


def read_tower(config: Config, *, has_windows: bool = False) -> Tower | None:
    """The tower of a text model's config.json with `vision_config` and `image_token_id` beside the text's keys; None without.

    has_windows: see Tower. Raises UnsupportedModel naming a key that changes the tower or has an unknown effect, InvalidArgument
    naming a missing or invalid one.
    """
    vision = config.get("vision_config")
    if vision is None:
        return None
    if not isinstance(vision, dict):
        raise InvalidArgument("vision_config", "must be a table in the model's config.json")
    vision = {**vision, "architectures": config["architectures"]}
    for key, value in vision.items():
        if key in _NOTES or key.startswith("_") or (key, value) == _ROTATION:
            continue
        if key not in _OWN_SIZES[has_windows] and value:
            raise unsupported(vision, key, "its effect on the vision tower is unknown; unset it if nothing is computed from it")
    if not has_windows and number(config, "rms_norm_eps", default=_EPSILON) != _EPSILON:
        raise unsupported(
            config,
            "rms_norm_eps",
            f"the engine gives it to the norms of the vision tower, which have {_EPSILON} in transformers",
        )
    if vision.get("hidden_act", activation := _ACTIVATION[has_windows]) != activation:
        raise unsupported(vision, "hidden_act", f"trainer and engine agree on {activation!r} only for the vision tower")
    out_size = size(config, "hidden_size")
    if (out := size(vision, "out_hidden_size")) != out_size:
        raise InvalidArgument("out_hidden_size", f"is {out}, but the text's hidden_size is {out_size}")
    depth, side = size(vision, "depth"), size(vision, "patch_size")
    merge_size, listed = size(vision, "spatial_merge_size", default=2), "fullatt_block_indexes" if has_windows else _DEEPSTACK
    blocks = elements(vision, listed, of=int) or []
    if blocks != sorted({each for each in blocks if 0 <= each < depth}):
        raise InvalidArgument(listed, f"must ascend below depth, {depth}, not {blocks}")
    if has_windows and (window := size(vision, "window_size", default=112)) < side * merge_size:
        raise InvalidArgument("window_size", f"is {window}, less than the {side * merge_size} pixels of a token")
    return Tower(
        image_token_id=size(config, "image_token_id"),
        depth=depth,
        hidden_size=size(vision, "hidden_size"),
        intermediate_size=size(vision, "intermediate_size"),
        num_heads=size(vision, "num_heads"),
        patch_shape=(size(vision, "in_channels", default=3), size(vision, "temporal_patch_size", default=2), side, side),
        merge_size=merge_size,
        out_size=out_size,
        num_positions=0 if has_windows else size(vision, "num_position_embeddings"),
        deepstack=() if has_windows else tuple(blocks),
        has_windows=has_windows,
    )
