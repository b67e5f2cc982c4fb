"""Networks: a Hugging Face causal language model under FSDP2 that scores given tokens, as policy or critic."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tasuki.algorithms.lm_head import token_log_probs
from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.family import Model
from tasuki.models.known import read_model
from tasuki.models.stored_tensors import check_head, read_stored
from tasuki.trainer.attention.packed import IMPLEMENTATION, AttentionBackend, PackedAttention
from tasuki.trainer.attention.sequence_parallel import SequenceGroup
from tasuki.trainer.attention.trial import choose_delta, choose_kernel, choose_sharing
from tasuki.trainer.backends.fsdp.lora.adapters import add_adapters, initialize_adapters
from tasuki.trainer.backends.fsdp.memory import HostShards
from tasuki.trainer.backends.fsdp.shards import constant_shards, engine_placement, head_shards, local_shards, views_in
from tasuki.trainer.data.micro_batch import TokenBatch
from tasuki.trainer.durable.model_folder import load_shards
from tasuki.trainer.modules.compiled_blocks import compile_blocks
from tasuki.trainer.modules.experts import replace_experts, ungathered_parameters
from tasuki.trainer.modules.gated_delta import replace_delta_nets
from tasuki.trainer.modules.pointwise import fuse_pointwise
from tasuki.trainer.modules.qwen_vl import learns, text_inputs
from tasuki.trainer.modules.rotary import fuse_rotation
from tasuki.trainer.modules.routing import EXPERTS, Routers, replace_routers
from tasuki.trainer.replicas import mesh_device
from tasuki.weights.shared_base import SharedBase
from tasuki.wire.errors import UnsupportedModel


class LmHead(nn.Module):
    """Replaces a model's `lm_head`. The weight keeps its name and stays tied if it was.

    `weight` [V, H] is whole, in compute dtype, only inside `forward`. Untied, it is a separate FSDP2 group, gathered from this module's
    call until its backward; tied, it belongs to the root's group. Inputs keep their dtypes.
    """

    def __init__(self, projection: nn.Linear, *, softcap: float | None) -> None:
        super().__init__()
        assert projection.bias is None, "no supported family has one"
        self.weight, self.softcap = projection.weight, softcap

    def forward(self, hidden_NH: Tensor, token_ids_N: Tensor, *, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
        """See token_log_probs."""
        return token_log_probs(hidden_NH, self.weight, token_ids_N, temperature_N=temperature_N, softcap=self.softcap)


class _Network(nn.Module):
    def __init__(self, causal_lm: PreTrainedModel, *, attention: PackedAttention) -> None:
        super().__init__()
        replace_delta_nets(causal_lm)
        self.causal_lm, self._attention = causal_lm, attention
        self._routers = Routers(cast(nn.ModuleList, causal_lm.get_submodule("model.layers")))
        self.shares_prompts = attention.shares_prompts

    def _hidden_states(self, batch: TokenBatch) -> Tensor:
        """[N, H]: last hidden states at the positions of this rank's part that predict a completion token."""
        self._routers.begin(batch)
        positions_T = batch.position_ids_T if batch.positions_3T is None else batch.positions_3T
        outputs = self.causal_lm.model(
            **text_inputs(self.causal_lm, batch),
            position_ids=positions_T.unsqueeze(-2),
            use_cache=False,
            layer_attention=self._attention.over(batch),
        )
        return outputs.last_hidden_state.squeeze(0).index_select(0, batch.places_N)


class Policy(_Network):
    """Scores completion tokens. Only positions that predict one pass through the LM head."""

    def __init__(
        self, causal_lm: PreTrainedModel, *, attention: PackedAttention, final_logit_softcap: float | None = None
    ) -> None:
        super().__init__(causal_lm, attention=attention)
        causal_lm.lm_head = LmHead(causal_lm.lm_head, softcap=final_logit_softcap)
        self._logits_scaling: float = getattr(causal_lm.config, "logits_scaling", 1.0)  # Granite's

    def forward(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Log-probs [N] with gradient, and entropies [N]; float32. Its backward must precede the next pass."""
        hidden_NH, temperature_N = self._hidden_states(batch), batch.temperature_N * self._logits_scaling
        scores_N = self.causal_lm.lm_head(hidden_NH, batch.token_ids_N, temperature_N=temperature_N)
        log_probs_N, entropy_N = self._attention.gather(*scores_N, batch=batch)
        return log_probs_N, entropy_N


class Critic(_Network):
    """Estimates the value of each completion token from the tokens before it: a linear head replaces the LM head."""

    def __init__(self, causal_lm: PreTrainedModel, *, attention: PackedAttention) -> None:
        super().__init__(causal_lm, attention=attention)
        causal_lm.lm_head = nn.Identity()
        self.value_head = nn.Linear(causal_lm.config.hidden_size, 1, bias=False, dtype=torch.float32)

    def forward(self, batch: TokenBatch) -> Tensor:
        """Values [N] with gradient, float32."""
        return self._attention.gather(self.value_head(self._hidden_states(batch)).squeeze(-1), batch=batch)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSource:
    """How to build a network, and from what."""

    path: Path
    """Model folder with the initial weights."""
    config: PreTrainedConfig
    """Configuration of that folder."""
    mesh: DeviceMesh
    param_dtype: torch.dtype
    """Dtype of the shards."""
    compute_dtype: torch.dtype
    """Dtype of forward and backward."""
    attention_backend: AttentionBackend | Literal["auto"] = "auto"
    lora: LoraConfig | None = None
    """If set, only adapters are trained."""
    seed: int = 0
    """Seed for new adapters."""
    sharing: SequenceGroup | None = None
    """Ranks that compute the other parts of each micro-batch."""
    compiles: bool = False
    """Whether to compile its layers."""
    prefix_sharing: Literal["auto"] | bool = False
    """Whether samples share prompts: "auto" where the kernel can, true or else refused."""
    expert_parallel: bool = False
    """Whether each rank computes its own experts, which are not gathered."""
    trains_tower: bool = False
    on_host: HostShards | None = None
    """If set, where the shards are; the region of load_policy is not used then."""
    base: SharedBase | None = None
    """With `lora`: the weights, where they are the engine's; nothing is read from the folder then."""

    @property
    def model(self) -> Model:
        """The family's description, with transformers' defaults for keys that config.json lacks."""
        return read_model(self.config.to_dict())


def load_policy(source: NetworkSource, *, region: AbstractContextManager[None]) -> Policy:
    """Loads the model of `source`, sharded. Every rank reads only its own rows. Allocates the shards in `region`.

    Gradients are summed, not averaged, over ranks in float32. Raises as read_model, check_module, load_shards and check_head.
    """
    softcap = source.model.final_logit_softcap
    policy = Policy(_on_meta(source), attention=_attention(source), final_logit_softcap=softcap)
    _materialize(policy, source, region=region)
    _load(policy, source)
    if source.model.shape.is_tied:
        check_head(read_stored(source.path), source.model.shape, first=source.mesh.get_local_rank(), step=source.mesh.size())
    return policy


def load_critic(source: NetworkSource, *, region: AbstractContextManager[None]) -> Critic:
    """Same as load_policy, with a value head: the folder's `value_head.weight`, or zeros, so that every value starts at 0."""
    attention = _attention(source)
    with torch.device("meta"):
        critic = Critic(_on_meta(source), attention=attention)
    # The head computes in float32: rounding would add noise to the advantages.
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    fully_shard(critic.value_head, mesh=source.mesh, mp_policy=precision)
    _materialize(critic, source, region=region)
    _load(critic, source)
    head = head_shards(critic)
    if all(shard.name in read_stored(source.path) for shard in head):
        load_shards(source.path, head)
    else:
        critic.value_head.weight.data.zero_()
    return critic


def _attention(source: NetworkSource) -> PackedAttention:
    """Raises InvalidArgument if source.attention_backend does not support the model or, with prefix_sharing = true, shared prompts."""
    model, shape = source.model, source.model.shape
    if source.sharing is not None:
        num_parts = source.sharing.part.num_parts
        heads, kv_heads = shape.num_heads // num_parts, max(1, shape.num_kv_heads // num_parts)
        shape = replace(shape, num_heads=heads, num_kv_heads=kv_heads)
    settings = {"shape": shape, "attention": model.attention, "dtype": source.compute_dtype, "device": mesh_device(source.mesh)}
    backend = choose_kernel(source.attention_backend, **settings)
    if model.shape.delta is not None:
        assert source.sharing is None and source.prefix_sharing is not True, "check_model refuses both"
        delta = choose_delta(model.shape.delta, dtype=source.compute_dtype, device=mesh_device(source.mesh))
        return PackedAttention(backend, model.attention, delta=delta)
    shares_prompts = choose_sharing(backend, source.prefix_sharing, **settings)
    return PackedAttention(backend, model.attention, source.sharing, shares_prompts=shares_prompts)


def _on_meta(source: NetworkSource) -> PreTrainedModel:
    """The model on the meta device, with adapters if configured."""
    model = source.model
    with torch.device("meta"):
        experts = {"experts_implementation": EXPERTS} if model.shape.num_experts else {}
        causal_lm = AutoModelForCausalLM.from_config(
            _without_dropout(source.config), dtype=source.param_dtype, attn_implementation=IMPLEMENTATION, **experts
        )
        check_module(causal_lm, model)
        correct_latent_norms(causal_lm)
        replace_routers(causal_lm)
        if source.mesh.device_type == "cuda" or source.compiles:
            fuse_pointwise(causal_lm)
            fuse_rotation(causal_lm)
        if source.expert_parallel or (source.lora is not None and source.lora.experts):
            replace_experts(causal_lm, source.mesh if source.expert_parallel else None)
        if source.lora is not None:
            add_adapters(causal_lm, source.lora)
        tower = getattr(causal_lm, "visual", None)
        if source.trains_tower and tower is not None:
            tower.requires_grad_(True)
        if tower is not None and learns(tower):
            tower.gradient_checkpointing_enable({"use_reentrant": False})
    return causal_lm


def _materialize(network: Policy | Critic, source: NetworkSource, *, region: AbstractContextManager[None]) -> None:
    """Shards a network on the meta device and allocates its shards."""
    placement = engine_placement(network.causal_lm) if source.base is not None and source.mesh.size() > 1 else None
    _shard(network, source, placement=placement)
    device = mesh_device(source.mesh)
    make = partial(torch.empty_like, device=device)
    if source.on_host is not None:
        make = source.on_host.make(network)
    if source.base is not None:
        make = views_in(source.base, network.causal_lm, otherwise=make)
    with nullcontext() if source.on_host is not None else region:
        # FSDP2 also pads the shards here, so that they stay where they are from now on.
        network._apply(make)
    set_buffers(network.causal_lm, source.model, device=device)
    if source.compiles:
        compile_blocks(network.causal_lm)


def _load(network: Policy | Critic, source: NetworkSource) -> None:
    """Reads the weights, unless they are the engine's, and initializes adapters."""
    if source.base is None:
        load_shards(source.path, local_shards(network.causal_lm) + constant_shards(network.causal_lm))
    if source.lora is not None:
        initialize_adapters(network.causal_lm, source.lora, seed=source.seed)


def reshard(network: Policy | Critic) -> None:
    """Frees what a forward pass has left gathered, if no backward pass follows: root and LM head, or everything."""
    for module in groups_of(network):
        module.reshard()


def _shard(
    network: Policy | Critic, source: NetworkSource, *, placement: Callable[[nn.Parameter], Shard | None] | None
) -> None:
    """Creates the FSDP2 groups: each layer, embeddings, last norm, LM head and vision tower, and the root with the rest.

    A tied embedding is used at both ends of a pass, so it belongs to the root, which stays gathered in between. placement: of layers'
    parameters; None shards all by rows. Spread experts are in no group.
    """
    # Inputs keep their dtypes: otherwise FSDP2 would round the temperatures in the batch to bfloat16.
    mesh = source.mesh
    offload = OffloadPolicy() if source.on_host is None else source.on_host.policy
    precision = MixedPrecisionPolicy(param_dtype=source.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    shard = partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload)
    decoder, head = network.causal_lm.model, network.causal_lm.lm_head
    for layer in decoder.layers:
        spread = set(ungathered_parameters(layer)) or None
        shard(layer, reshard_after_forward=True, shard_placement_fn=placement, ignored_params=spread)
    # Not in the root's group, which is gathered first: the last weights in memory are the last that a forward pass needs.
    shard(decoder.norm, reshard_after_forward=False)
    is_policy = isinstance(head, LmHead)
    if not (is_policy and head.weight is decoder.embed_tokens.weight):
        # Its gradient needs only the token ids.
        shard(decoder.embed_tokens).set_unshard_in_backward(False)
        if is_policy:
            # Backward starts with it.
            shard(head, reshard_after_forward=False)
    if (layer_inputs := getattr(decoder, "embed_tokens_per_layer", None)) is not None:
        shard(layer_inputs).set_unshard_in_backward(False)
    if (tower := getattr(network.causal_lm, "visual", None)) is not None:
        shard(tower)
    shard(network)
    if mesh.size() == 1:
        return
    for module in groups_of(network):
        module.set_gradient_divide_factor(1.0)
        # Otherwise a factor other than the number of ranks would need an NCCL-only operation.
        module.set_force_sum_reduction_for_comms(True)


def groups_of(network: Policy | Critic) -> Iterator[FSDPModule]:
    """FSDP2's groups of parameters."""
    return (module for module in network.modules() if isinstance(module, FSDPModule))


def _without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with all dropout probabilities set to 0: a token must have the same log-prob in every call."""
    copy = deepcopy(config)
    for name, value in vars(copy).items():
        if isinstance(value, int | float) and ("dropout" in name or "pdrop" in name):
            setattr(copy, name, 0.0)
    return copy


def check_module(causal_lm: PreTrainedModel, model: Model) -> None:
    """Raises UnsupportedModel naming a parameter or buffer that only one of the two has, or whose shapes differ.

    causal_lm: as created by transformers, without adapters, possibly on the meta device.
    """
    found = {f"parameter {name}": str(list(param.shape)) for name, param in causal_lm.named_parameters()}
    found |= {f"buffer {name}": "there" for name, _ in causal_lm.named_buffers()}
    known = {f"parameter {name}": str(list(shape)) for name, shape in model.shape.parameters().items()}
    known |= {f"buffer {name}": "there" for name in model.buffers()}
    for what in sorted(found.keys() | known.keys(), key=lambda what: (what.startswith("buffer"), what)):
        one, other = found.get(what, "absent"), known.get(what, "absent")
        if one != other:
            architecture = type(causal_lm).__name__
            text = f"{architecture}: {what} is {one} in transformers and {other} in tasuki.models"
            raise UnsupportedModel(text, architecture=architecture)


def correct_latent_norms(causal_lm: PreTrainedModel) -> None:
    """Gives norms of latent attention the epsilon of all others.

    transformers leaves them at 1e-6 whatever the configuration has; the engine does not. GLM 4.7 Flash has 1e-5, as has slime's training
    recipe for it (scripts/models/glm4.7-30B-A3B.sh) in all norms.
    """
    for name, norm in causal_lm.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            cast(Any, norm).variance_epsilon = cast(Any, causal_lm.config).rms_norm_eps


def set_buffers(causal_lm: PreTrainedModel, model: Model, *, device: torch.device) -> None:
    """Initializes every buffer: those in a checkpoint with zeros, others as the configuration says. Call it after `to_empty`."""
    decoder = cast(Any, causal_lm).model
    with torch.device(device):
        decoder.rotary_emb = type(decoder.rotary_emb)(config=causal_lm.config)
        if model.shape.tower is not None:
            rotary = cast(Any, causal_lm).visual.rotary_pos_emb
            # From transformers 5.19 on it has a configuration.
            rotary.inv_freq = type(rotary)(rotary.dim if hasattr(rotary, "dim") else rotary.config).inv_freq
    constants = {name: torch.zeros(shape, device=device) for name, shape in model.shape.constants().items()}
    computed = {name: torch.tensor(value, device=device) for name, value in model.constant_buffers.items()}
    for name, value in (constants | computed).items():
        module_name, _, buffer_name = name.rpartition(".")
        causal_lm.get_submodule(module_name).register_buffer(buffer_name, value, persistent=False)
