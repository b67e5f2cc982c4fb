"""What models need in SGLang, single ones or all. Each part says what it works around; delete it when SGLang does so itself."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers import logits_processor
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from tasuki.models.known import find_family
from tasuki.models.routes import RouteShape
from tasuki.models.shape import ModelShape
from tasuki.rollout.model import UNROTATED
from tasuki.rollout.sglang.cpu.attention import install_cpu_latent_attention, install_without_triton
from tasuki.rollout.sglang.cpu.kernels import install_delta_nets
from tasuki.rollout.sglang.images import install_levels


def install_model(shape: ModelShape, *, device: str | None) -> None:
    """Changes the classes of this process for a model. Call it before the model is built."""
    if shape.architecture.startswith("Glm4Moe"):
        install_live_routers()
    if shape.latent is not None:
        install_latent_attention(device=device)
    if shape.has_sinks:
        _install_oss(device=device)
    if shape.architecture == UNROTATED:
        _install_unrotated()
    if shape.tower is None and find_family(shape.architecture).text_module:
        leave_out_tower(shape.architecture)
    if shape.layer_sizes:
        install_gemma4()
        install_layer_sizes(shape)
        if device == "cpu":
            install_without_triton()
    if shape.tower is not None:
        if shape.tower.has_windows:
            _install_window_tower()
        install_levels()
    if shape.delta is not None and device == "cpu":
        install_delta_nets()


def install_live_routers() -> None:
    """GLM 4.5 and 4.7 Flash: routers read their weight in every pass, in CUDA graphs too.

    SGLang's keep a float32 copy of their first weight, which later weights would not reach (models/glm4_moe.py: "must be invalidated").
    """
    from sglang.srt.models import glm4_moe, glm4_moe_lite

    gates: tuple[Any, ...] = (glm4_moe.Glm4MoeGate, glm4_moe_lite.Glm4MoeLiteGate)
    for gate in gates:
        gate.forward = _router_logits


def _router_logits(gate: Any, hidden_TH: Tensor) -> Tensor:
    """[T, E] float32."""
    return linear(hidden_TH.float(), gate.weight.float())


def install_latent_attention(*, device: str | None) -> None:
    """Latent attention (MLA) of DeepSeek's form: `w_kc` and `w_vc` are views of `kv_b_proj`, which every sync reaches.

    SGLang copies them when weights are loaded (models/deepseek_common/deepseek_weight_loader.py).
    """
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    loader: Any = deepseek_weight_loader
    loader.DeepseekV2WeightLoaderMixin.post_load_weights = view_projections
    # The recorder sees nothing of what other threads write.
    loader.should_async_load = lambda _: False
    if device == "cpu":
        install_cpu_latent_attention()


def view_projections(causal_lm: Any, is_nextn: bool = False, weight_names: object = None) -> None:
    """Called after loading. w_kc: [heads, D, R] of keys without rotation; w_vc: [heads, R, D] of values."""
    assert not is_nextn, "layers for drafts are not loaded"
    for layer in causal_lm.model.layers:
        attention = layer.self_attn
        sizes = attention.qk_nope_head_dim, attention.v_head_dim
        rows = attention.kv_b_proj.weight.data.unflatten(0, (-1, sum(sizes)))
        attention.w_kc, values = rows.split(sizes, dim=1)
        attention.w_vc = values.transpose(1, 2)
        # SGLang does so in the first pass; a module that comes later would make the copy plan void.
        attention.attn_mha.kv_b_proj = attention.kv_b_proj


def _install_oss(*, device: str | None) -> None:
    """gpt-oss: sinks in the engine's dtype, which SGLang holds in bfloat16, and on a CPU an activation that is not compiled."""
    from sglang.srt.models import gpt_oss

    attention: Any = gpt_oss.GptOssAttention
    build = attention.__init__

    @functools.wraps(build)
    def built(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        if self.sinks.dtype == torch.bfloat16:  # one backend on a GPU needs float32
            self.sinks.data = self.sinks.data.to(torch.get_default_dtype())

    attention.__init__ = built
    if device == "cpu":
        from sglang.srt.layers.moe import fused_moe_native

        native: Any = fused_moe_native
        native.swiglu_gpt_oss_sigmoid_alpha = native.swiglu_gpt_oss_sigmoid_alpha._torchdynamo_orig_callable


class _Unrotated(nn.Module):
    """Takes the place of a layer's rotary embedding."""

    def forward(self, positions: Tensor, query: Tensor, key: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return query, key


def _install_unrotated() -> None:
    """SmolLM3, of which SGLang has no model: a Llama whose layers follow `no_rope_layers` of config.json."""
    from sglang.srt.models import llama

    attention: Any = llama.LlamaAttention
    build = attention.__init__

    @functools.wraps(build)
    def built(self: Any, config: Any, *args: Any, layer_id: int = 0, **options: Any) -> None:
        build(self, config, *args, layer_id=layer_id, **options)
        if not config.no_rope_layers[layer_id]:
            self.rotary_emb = _Unrotated()

    attention.__init__ = built


class _NoTower(nn.Module):
    """Takes the tower's place in SGLang's models."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.deepstack_visual_indexes: list[int] = []


def leave_out_tower(architecture: str) -> None:
    """A vision model's text: no tower is built, since none is trained and nobody sends images."""
    if architecture.startswith("Gemma3"):
        from sglang.srt.models import gemma3_mm

        gemma3_mm.SiglipVisionModel = gemma3_mm.Gemma3MultiModalProjector = _NoTower
    elif architecture.startswith("Gemma4"):
        from sglang.srt.models import gemma4_mm

        gemma4_mm.Gemma4VisionEncoder = gemma4_mm.Gemma4AudioEncoder = gemma4_mm.Gemma4MultimodalEmbedder = _NoTower
    else:
        from sglang.srt.models import qwen3_vl

        qwen3_vl.Qwen3VLMoeVisionModel = _NoTower


def install_gemma4() -> None:
    """Gemma 4's text: no token is taken for an image's, and what layers with keys of other layers hold of keys and values is constant.

    SGLang has such parameters, writes to them what a checkpoint may have, and does not use them.
    """
    from sglang.srt.models import gemma4_causal, gemma4_mm

    attention: Any = gemma4_causal.Gemma4Attention
    build = attention.__init__

    @functools.wraps(build)
    def built(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        if self.is_kv_shared_layer:
            weight = self.qkv_proj.weight
            weight.weight_loader = functools.partial(_load_queries, self, weight.weight_loader)

    attention.__init__ = built
    gemma4_mm.Gemma4ForConditionalGeneration.forward = _logits_of_text


def _load_queries(attention: Any, load: Any, weight: Any, loaded: Tensor, shard: str) -> None:
    load(weight, loaded, shard)
    weight.data[attention.q_size :].zero_()
    attention.k_norm.weight.data.zero_()


def _logits_of_text(self: Any, input_ids: Tensor, positions: Tensor, forward_batch: Any, *_: object, **__: object) -> Any:
    hidden_TH = self.language_model(input_ids, positions, forward_batch)
    return self.logits_processor(input_ids, hidden_TH, self.language_model.embed_tokens, forward_batch)


def install_layer_sizes(shape: ModelShape) -> None:
    """A cache with heads of each layer's number and size, and none for layers that use keys of others.

    SGLang has equal ones in all layers, or two caches (SWAKVPool), one of which forgets what windows no longer see.
    """
    from sglang.srt.mem_cache.memory_pool import GPU_MEMORY_TYPE_KV_CACHE, MHATokenToKVPool
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
    from sglang.srt.runtime_context import get_parallel

    pool: Any = MHATokenToKVPool
    configurator: Any = DefaultPoolConfigurator
    store = pool._store_kv_layer

    def sizes() -> list[tuple[int, int]]:
        return [(max(1, one.num_kv_heads // get_parallel().attn_tp_size), one.head_dim) for one in shape.cached_layers]

    def create(self: Any) -> None:
        rows = self.size + self.page_size
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.k_buffer, self.v_buffer = (
                [torch.zeros((rows, *heads), dtype=self.store_dtype, device=self.device) for heads in sizes()] for _ in range(2)
            )

    def store_layer(self: Any, layer: int, *rest: Any) -> None:
        self.row_dim = self.v_row_dim = self.k_buffer[layer][0].numel()
        store(self, layer, *rest)

    pool._create_buffers_normal, pool._store_kv_layer = create, store_layer
    configurator._compute_cell_size = lambda _, kvc, *__: (
        2 * sum(number * head_dim for number, head_dim in sizes()) * kvc.kv_cache_dtype.itemsize
    )


def _install_window_tower() -> None:
    """Qwen2.5-VL's vision tower, with rotary angles in float32.

    SGLang rounds them to the engine's dtype (Qwen2_5_VisionTransformer.forward), in bfloat16 by up to a quarter of a radian, and takes
    patches of other than 1,176 numbers for embeddings (get_image_feature).
    """
    from sglang.srt.models import qwen2_5_vl

    changed: tuple[Any, Any] = qwen2_5_vl.Qwen2_5_VisionTransformer, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
    changed[0].forward, changed[1].get_image_feature = _embeddings, _image_feature


def _image_feature(self: Any, items: list[Any]) -> Tensor:
    pixels_PD, grids_I3 = (torch.cat([getattr(item, name) for item in items]) for name in ("feature", "image_grid_thw"))
    return self.visual(pixels_PD, grid_thw=grids_I3)


def _embeddings(self: Any, x: Tensor, grid_thw: Tensor) -> Tensor:
    """x: patches [P, D]. grid_thw: [I, 3]. Returns the embeddings of all images, in order."""
    from sglang.srt.layers.attention.vision import prepare_vision_attention_metadata

    hidden_PH = self.patch_embed(x.to(self.device, self.dtype))
    places, ends = self.get_window_index(grid_thw)
    places = places.to(self.device)

    def by_window(each: Tensor) -> Tensor:
        return each.unflatten(0, (-1, self.spatial_merge_unit))[places].flatten(0, 1)

    angles_PD = by_window(self.rot_pos_emb(grid_thw).float()).repeat(1, 2)
    rotation = angles_PD.cos(), angles_PD.sin()
    windows = torch.tensor(ends, dtype=torch.int32, device=self.device).unique_consecutive()
    images = pad(grid_thw.prod(dim=1).cumsum(0), (1, 0)).to(self.device, torch.int32)
    spans = [(each, prepare_vision_attention_metadata(each, device=self.device)) for each in (windows, images)]
    hidden_P1H = by_window(hidden_PH).unsqueeze(1)
    for index, block in enumerate(self.blocks):
        cu_seqlens, metadata = spans[index in self.fullatt_block_indexes]
        hidden_P1H = block(hidden_P1H, cu_seqlens=cu_seqlens, position_embeddings=rotation, forward_metadata=metadata)
    return self.merger(hidden_P1H)[places.argsort()]


def install_routes(model: ModelShape, *, device: str) -> None:
    """Routes in one byte, or two above 256 experts; nothing for a dense model.

    SGLang keeps, copies and sends int32, and pins host memory on a CPU, too. Its buffers are indexed by a token's slot in the KV cache,
    so that cached prefixes have theirs; a pause of the cache forgets both.
    """
    if (routes := RouteShape.of(model)) is None:
        return
    from sglang.srt.state_capturer import base

    dtype = torch.uint8 if routes.dtype.itemsize == 1 else torch.int16

    class HostRoutes(base.BaseHostCache):
        def __init__(self, num_tokens: int, num_layers: int, topk_size: int, name: str, **_: object) -> None:
            shape = num_tokens, num_layers, topk_size
            self.num_tokens, self.num_layers, self.topk_size, self.name = *shape, name
            self.buffer = torch.zeros(shape, dtype=dtype, pin_memory=device == "cuda")

        def destroy(self) -> None:
            """Leaves the buffer to torch: SGLang 0.5.23 pins one itself, and unpins it here."""

    class DeviceRoutes(base.BaseDeviceCache):
        def __init__(self, max_batch_size: int, num_layers: int, topk_size: int, device: str, name: str) -> None:
            self.num_layers, self.topk_size, self.name = num_layers, topk_size, name
            self.buffer = torch.zeros((max_batch_size, num_layers, topk_size), dtype=dtype, device=device)

    base.BaseHostCache, base.BaseDeviceCache = HostRoutes, DeviceRoutes
    if model.architecture == "MixtralForCausalLM":
        _name_layers()


def _name_layers() -> None:
    """Tells Mixtral's choice of experts its layer, which SGLang 0.5.17 does not: the engine ends when it keeps the first routes."""
    from sglang.srt.models import mixtral

    create = mixtral.MixtralMoE.__init__

    def named(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        self.topk.layer_id = self.experts.layer_id

    mixtral.MixtralMoE.__init__ = named


def install_windows() -> None:
    """Makes windows of SGLang's Triton attention as wide for a sampled token as for a prompt's. Call it before the model is built.

    While decoding, SGLang leaves out the oldest token of a window (sgl-project/sglang#32087). Delete this when it does not.
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend: Any = TritonAttnBackend
    build = backend.__init__

    @functools.wraps(build)
    def built(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        if self.sliding_window_size is not None and self.sliding_window_size > 0:
            self.sliding_window_size += 1  # a prefill masks by the size that the layer has

    backend.__init__ = built


_Projection = Callable[[Any, Tensor, Any, Tensor | None], Tensor]


def install_float32_logits() -> None:
    """Makes every LogitsProcessor of this process project in float32 if the weight allows it.

    SGLang rounds logits to bfloat16, whose steps at 20 are 0.125. Its enable_fp32_lm_head converts the whole weight for every token.
    A GPU's matrix product accumulates in float32 anyway, so it suffices to skip the rounding.

    With tensor parallelism each rank projects onto its part of the vocabulary, and float32 logits are gathered. Works in CUDA graphs.
    """
    processor: Any = logits_processor.LogitsProcessor
    processor._compute_lm_head = _float32_projection(processor._compute_lm_head)


def _float32_projection(projection: _Projection) -> _Projection:
    """projection: SGLang's original, used for any other weight."""

    def project(processor: Any, hidden_TH: Tensor, lm_head: Any, embedding_bias: Tensor | None = None) -> Tensor:
        if _has_plain_weight(lm_head):
            return float32_product(hidden_TH, lm_head.weight)
        return projection(processor, hidden_TH, lm_head, embedding_bias)

    return project


def float32_product(hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """[T, V] float32, accumulated and returned without rounding. weight_VH: bfloat16 or float16, on a GPU."""
    return torch.mm(hidden_TH.to(weight_VH.dtype), weight_VH.T, out_dtype=torch.float32)


def _has_plain_weight(lm_head: Any) -> bool:
    """Whether the projection is a single product with a 16-bit weight on a GPU, neither quantized nor wrapped by an adapter."""
    weight = getattr(lm_head, "weight", None)
    is_wrapped = hasattr(lm_head, "set_lora") and hasattr(lm_head, "apply_lora")
    if not isinstance(weight, Tensor) or not weight.is_cuda or is_wrapped:
        return False
    quant_method = getattr(lm_head, "quant_method", None)
    is_quantized = logits_processor.should_apply_lm_head_quant_method(lm_head, quant_method)
    return weight.dtype in (torch.bfloat16, torch.float16) and not is_quantized
