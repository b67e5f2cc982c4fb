"""Mixtral: experts in every layer, separate in a checkpoint as w1 (gate), w3 (up) and w2 (down) of block_sparse_moe."""

from __future__ import annotations

from tasuki.models import rope
from tasuki.models.checkpoint import CheckpointNames
from tasuki.models.config_json import Config, size
from tasuki.models.family import Family, Model, full_attention, refuse_head_dim, refuse_window
from tasuki.models.shape import decoder_shape
from tasuki.wire.errors import UnsupportedModel


def _read(config: Config) -> Model:
    refuse_window(config, default=None)
    refuse_head_dim(config)
    for base in rope.bases(config):
        if base != int(base):
            raise UnsupportedModel(
                f"{FAMILY.architecture} with rope_theta {base}: the engine rounds it down; give a whole number",
                architecture=FAMILY.architecture,
                field="rope_theta",
            )
    shape = decoder_shape(
        config,
        num_experts=size(config, "num_local_experts"),
        experts_per_token=size(config, "num_experts_per_tok"),
        expert_size=size(config, "intermediate_size"),
    )
    return Model(shape=shape, attention=full_attention(shape))


FAMILY = Family(
    architecture="MixtralForCausalLM",
    read=_read,
    keys={
        "sliding_window": None,
        "num_local_experts": None,
        "num_experts_per_tok": None,
        "router_jitter_noise": (0,),
        # SGLang's Mixtral would leave its LM head unset for a checkpoint with tied embeddings.
        "tie_word_embeddings": (False,),
    },
    # SGLang's Mixtral reads only the base of the rotary embedding.
    rope_types=rope.DEFAULT,
    checkpoint=CheckpointNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
)
