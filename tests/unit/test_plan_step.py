"""Working memory of a step by the planner, against the tensors that our policy holds at its peak."""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    Qwen2_5_VLTextConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3VLTextConfig,
)

from tasuki.models.family import full_attention
from tasuki.models.known import read_model
from tasuki.planner.node import Checkpointing, Node, Part
from tasuki.planner.step_bytes import step_moments
from tasuki.trainer.attention.packed import IMPLEMENTATION, PackedAttention
from tasuki.trainer.backends.fsdp.activations import set_checkpointing
from tasuki.trainer.backends.fsdp.memory import HostActivations
from tasuki.trainer.backends.fsdp.model import Critic, Policy
from tasuki.trainer.data.micro_batch import ImageBatch, TokenBatch
from tasuki.trainer.data.samples import SampleImages
from tasuki.trainer.modules.experts import replace_experts
from tasuki.trainer.modules.qwen_vl import text_inputs
from tasuki.trainer.modules.routing import replace_routers
from tests.extent import IS_WHOLE
from tests.planned import node_with

NUM_TOKENS = 2003  # a size that no parameter has
NUM_CHOSEN = 2
HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS = 128, 4, 4
PER_TOKEN = 2 * 2 * HIDDEN_SIZE + 4 * NUM_HEADS
"""Bytes of a layer's input, and of its attention's output with a float32 number per head."""
_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 640,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


class LiveTokens(TorchDispatchMode):
    """Peak bytes of live storages with one of these sizes, by default one for every token. Those of `apart` do not count."""

    def __init__(
        self,
        apart: Sequence[torch.Tensor] = (),
        *,
        sizes: Sequence[int] = (NUM_TOKENS, NUM_TOKENS - 1, NUM_TOKENS * NUM_CHOSEN),
    ) -> None:
        super().__init__()
        self._sizes = set(sizes)
        self.peak = self._now = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in apart}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and self._sizes & set(tensor.shape):
                self._add(tensor.untyped_storage())
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self._now += num_bytes
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._remove, key, num_bytes)

    def _remove(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self._now -= num_bytes


def _one_sequence(vocab_size: int) -> TokenBatch:
    """Makes samples whose tokens, except the first, are all completion tokens."""
    token_ids = torch.randint(vocab_size, (NUM_TOKENS + 1,))
    return TokenBatch(
        input_ids_T=token_ids[:-1],
        position_ids_T=torch.arange(NUM_TOKENS),
        cu_seqlens_S=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        max_seqlen=NUM_TOKENS,
        places_N=torch.arange(1, NUM_TOKENS),
        token_ids_N=token_ids[2:],
        temperature_N=torch.ones(NUM_TOKENS - 1),
        num_places=(NUM_TOKENS - 1,),
    )


@pytest.mark.parametrize(
    ("checkpointing", "kept_layers", "vocab_size", "moment"),
    [
        ("none", 0, 64, "layer"),
        ("attention", 0, 64, "layer"),
        ("attention", 0, 8000, "loss"),
        ("full", 1, 64, "layer"),
        ("offloaded", 0, 64, "layer"),
        ("offloaded", 2, 64, "layer"),
        *([("attention", 2, 64, "layer"), ("full", 0, 64, "layer"), ("full", 0, 8000, "loss")] if IS_WHOLE else []),
    ],
)
def test_activations_and_logits_peak_as_predicted(
    checkpointing: str, kept_layers: int, vocab_size: int, moment: str, mesh: DeviceMesh
):
    on_host = _on_host(checkpointing, mesh, kept_layers=kept_layers)
    causal_lm = _causal_lm(checkpointing, vocab_size, on_host, kept_layers=kept_layers)
    policy = Policy(causal_lm, attention=_attention(causal_lm)).train()
    with LiveTokens(apart=on_host._buffers) as live:
        log_probs, _ = policy(_one_sequence(vocab_size))
        log_probs.sum().backward()
    moments = _moments(replace(_node(causal_lm, checkpointing), kept_layers=kept_layers))
    assert max(moments, key=lambda name: moments[name]) == moment
    assert moments[moment] == pytest.approx(live.peak, rel=0.02)


@pytest.mark.parametrize("checkpointing", list(Checkpointing) if IS_WHOLE else ["none", "full"])
def test_layers_of_different_sizes_with_own_inputs_peak_as_predicted(checkpointing: str, mesh: DeviceMesh):
    on_host = _on_host(checkpointing, mesh)
    config = Gemma4TextConfig(
        **_SIZES,
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=32,
        head_dim=32,
        global_head_dim=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=4096,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    )
    causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION)
    set_checkpointing(causal_lm, Checkpointing(checkpointing), on_host=on_host)
    with LiveTokens(apart=on_host._buffers) as live:
        log_probs, _ = Policy(causal_lm, attention=_attention(causal_lm)).train()(_one_sequence(64))
        log_probs.sum().backward()
    moments = _moments(_node(causal_lm, checkpointing))
    assert max(moments.values()) == pytest.approx(live.peak, rel=0.025)


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("inner_size", [256, 2048], ids=["attention", "mlp"])
@pytest.mark.parametrize("has_windows", [False, True], ids=["plain", "windows"])
def test_a_tower_peaks_as_predicted(has_windows: bool, inner_size: int, is_trained: bool):
    side, rope = 44, {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    text: dict[str, Any] = {**_SIZES, "vocab_size": 64, "tie_word_embeddings": False, "image_token_id": 5}
    tower = {"depth": 3, "num_heads": 4, "patch_size": 8, "hidden_size": HIDDEN_SIZE, "intermediate_size": inner_size}
    tower |= {"out_hidden_size": HIDDEN_SIZE}
    if has_windows:
        tower |= {"window_size": 64, "fullatt_block_indexes": [1]}
        config: Any = Qwen2_5_VLTextConfig(**text, rope_parameters=rope, vision_config=tower)
    else:
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        rope |= {"mrope_interleaved": True}
        config = Qwen3VLTextConfig(**text, head_dim=32, rope_parameters=rope, vision_config=tower)
    causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if is_trained:
        causal_lm.visual.requires_grad_(True).gradient_checkpointing_enable({"use_reentrant": False})
    num_patches, num_tokens = side**2, side**2 // 4
    image = ImageBatch(
        distinct=SampleImages(
            num_images_S=np.ones(1, np.int64),
            image_I=np.zeros(1, np.int64),
            start_I=np.zeros(1, np.int64),
            grids_U3=np.array([[1, side, side]]),
            levels_PD=np.random.default_rng(0).integers(256, size=(num_patches, 3 * 64), dtype=np.uint8),
            values_CL=np.random.default_rng(0).standard_normal((3, 256), np.float32),
            merge_size=2,
        ),
        kept_U=np.zeros(1, np.int64),
        grids_U3=torch.tensor([[1, side, side]]),
        places_I=torch.arange(num_tokens),
        rows_I=torch.arange(num_tokens),
    )
    batch = replace(_one_sequence(64), input_ids_T=torch.full((num_tokens,), 5), images=image)
    with LiveTokens(sizes=(num_patches, num_tokens)) as live:
        inputs = text_inputs(causal_lm.train(), batch)
        if is_trained:
            sum(each.float().sum() for each in (inputs["inputs_embeds"], *inputs.get("deepstack_visual_embeds", ()))).backward()
    node = replace(_node(causal_lm, "none", train_tower=is_trained), micro_batch_tokens=num_tokens)
    assert _moments(node)["tower"] == pytest.approx(live.peak, rel=0.02)


@pytest.mark.parametrize("checkpointing", list(Checkpointing) if IS_WHOLE else ["attention", "offloaded"])
def test_a_critic_peaks_without_logits_as_predicted(checkpointing: str, mesh: DeviceMesh):
    on_host = _on_host(checkpointing, mesh)
    causal_lm = _causal_lm(checkpointing, 8000, on_host)
    node = _node(causal_lm, checkpointing)
    critic = (
        Critic(causal_lm, attention=_attention(causal_lm)).to(torch.bfloat16).train()
    )  # FSDP2 computes the head in the dtype of the rest
    with LiveTokens(apart=on_host._buffers) as live:
        critic(_one_sequence(8000)).sum().backward()
    of_critic = replace(node, critic=node.model).of_critic()
    assert of_critic is not None
    moments = _moments(of_critic)
    assert max(moments, key=lambda name: moments[name]) == "layer"
    assert moments["layer"] == pytest.approx(live.peak, rel=0.02)


@pytest.mark.parametrize(("checkpointing", "expert_size"), [("none", 320), ("full", 48)])
def test_experts_of_a_rank_peak_as_predicted(checkpointing: str, expert_size: int, mesh: DeviceMesh):
    """Measures on one rank, which computes every row that the planner counts."""
    config = Qwen3MoeConfig(
        **_SIZES, vocab_size=64, head_dim=32, num_experts=8, num_experts_per_tok=NUM_CHOSEN, moe_intermediate_size=expert_size
    )
    causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION)
    replace_routers(causal_lm)
    replace_experts(causal_lm, mesh)
    set_checkpointing(causal_lm, Checkpointing(checkpointing))
    node = _node(causal_lm, checkpointing)
    node = replace(
        node, config=node.config.model_copy(update={"trainer": node.trainer.model_copy(update={"expert_parallel": True})})
    )
    policy = Policy(causal_lm, attention=_attention(causal_lm)).train()
    peaks: list[int] = []
    for _ in range(3):
        with LiveTokens() as live:
            log_probs, _ = policy(_one_sequence(64))
            log_probs.sum().backward()
        peaks.append(live.peak)
    # On a busy machine a pass sometimes holds rows a moment longer, perhaps in gloo's thread.
    assert _moments(node)["layer"] == pytest.approx(min(peaks), rel=0.025)


def test_a_critic_has_the_parameters_that_are_counted(mesh: DeviceMesh):
    causal_lm = _causal_lm("none", 64, _on_host("none", mesh))
    of_critic = replace(_node(causal_lm, "none"), critic=_node(causal_lm, "none").model).of_critic()
    assert of_critic is not None
    counted = Counter(shape for unit in of_critic.model.units() for shape in unit.values())
    assert counted == Counter(
        tuple(parameter.shape) for parameter in Critic(causal_lm, attention=_attention(causal_lm)).parameters()
    )


def _on_host(checkpointing: str, mesh: DeviceMesh, *, kept_layers: int = 0) -> HostActivations:
    """Host memory for the layers that `_causal_lm` recomputes; if unused, for one layer without buffers."""
    num_layers = NUM_LAYERS - kept_layers if checkpointing == "offloaded" else 1
    return HostActivations(mesh, num_layers=num_layers, num_bytes=NUM_TOKENS * PER_TOKEN)


def _causal_lm(checkpointing: str, vocab_size: int, on_host: HostActivations, *, kept_layers: int = 0) -> Any:
    config = Qwen2Config(**_SIZES, vocab_size=vocab_size)
    causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION)
    set_checkpointing(causal_lm, Checkpointing(checkpointing), kept_layers=kept_layers, on_host=on_host)
    return causal_lm


def _attention(causal_lm: Any) -> PackedAttention:
    return PackedAttention("sdpa", full_attention(_node(causal_lm, "none").model))


def _node(causal_lm: Any, checkpointing: str, **trainer: Any) -> Node:
    model = read_model(causal_lm.config.to_dict() | {"architectures": [type(causal_lm).__name__]}).shape
    return node_with(
        model, device="cpu", micro_batch_tokens=NUM_TOKENS, logit_tokens=NUM_TOKENS - 1,
        trainer={"prefix_sharing": False} | trainer,
        checkpointing=Checkpointing(checkpointing),
    )  # fmt: skip


def _moments(node: Node) -> dict[str, int]:
    return {name: parts.get(Part.ACTIVATIONS, 0) + parts.get(Part.LOGITS, 0) for name, parts in step_moments(node).items()}
