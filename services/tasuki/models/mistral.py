"""Mistral 7B and similar models without a sliding window (from v0.2 on)."""

from __future__ import annotations

from tasuki.models.config_json import Config
from tasuki.models.family import Family, Model, full_attention, refuse_layer_types, refuse_window
from tasuki.models.shape import decoder_shape


def _read(config: Config) -> Model:
    refuse_layer_types(config)
    refuse_window(config, default=4096)
    shape = decoder_shape(config)
    return Model(shape=shape, attention=full_attention(shape))


FAMILY = Family(architecture="MistralForCausalLM", read=_read, keys={"sliding_window": None, "layer_types": None})
