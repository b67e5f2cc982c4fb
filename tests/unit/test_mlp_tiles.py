"""Tiled MLPs: the tensors kept for backward, and the planner's count of them."""

from tasuki.planner.kept_bytes import kept_in_mlp
from tasuki.planner.node import Checkpointing
from tasuki.planner.step_bytes import step_moments
from tasuki.trainer.backends.fsdp.activations import tile_mlps
from tests.models import make_model
from tests.planned import node_with
from tests.saved_tensors import kept_bytes
from tests.unit.test_packed_attention import LENGTHS, pack, policy_of


def test_nothing_inside_an_mlp_is_kept() -> None:
    causal_lm, batch = make_model("llama", seed=5), pack(LENGTHS)
    sizes: list[int] = []
    for num_tokens in (sum(LENGTHS), 25):
        policy = policy_of(causal_lm)
        tile_mlps(policy.causal_lm, num_tokens=num_tokens)
        with kept_bytes(policy.parameters()) as kept:
            policy(batch)
        sizes.append(sum(kept.values()))
    # In two layers, with the input of each tile.
    inside, hidden = 4 * 96 * 4, 64 * 4
    assert sizes[0] - sizes[1] >= 2 * sum(LENGTHS) * (inside - hidden)


def test_the_planner_counts_one_tile() -> None:
    tokens = 65_536
    for checkpointing, num_kept in ((Checkpointing.FULL, 1), (Checkpointing.NONE, 28)):
        whole, tiled, same = (
            node_with(num_ranks=2, micro_batch_tokens=tokens, checkpointing=checkpointing, trainer={"mlp_tile_tokens": size})
            for size in (None, 8192, tokens)
        )
        inside = kept_in_mlp(whole.model, 0, is_fused=True, keeps_product=checkpointing is Checkpointing.NONE)
        saved = num_kept * tokens * inside - 8192 * inside + (tokens - 8192) * whole.model.intermediate_size * 2
        assert sum(step_moments(whole)["layer"].values()) - sum(step_moments(tiled)["layer"].values()) == saved
        assert step_moments(same) == step_moments(whole)
