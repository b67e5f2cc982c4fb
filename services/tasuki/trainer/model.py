"""The policy: a Hugging Face causal language model under FSDP2 that scores given tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tasuki.algorithms.log_probs import token_log_probs
from tasuki.config.schema import LoraConfig
from tasuki.trainer.lora import add_adapters, initialize_adapters
from tasuki.trainer.mesh import mesh_device
from tasuki.trainer.shards import load_shards, local_shards
from tasuki.wire.errors import InvalidArgument, PathNotFound, UnsupportedModel

# Each was trained and published by the tests. All have `model`, a stack of `model.layers`, and `lm_head`.
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


# On a CPU torch's flash attention takes three times as long as plain matrix products to train bfloat16 sequences of tens of tokens.
_ATTENTION = {"cpu": "eager", "cuda": "sdpa"}


class Policy(nn.Module):
    """Scores completion tokens. Only the places that predict one pass through the vocabulary projection."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(
        self, input_ids_BL: Tensor, positions_T: Tensor, token_ids_T: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [T] with gradient, and entropies [T]; shapes as in micro_batch.TokenBatch."""
        hidden_BLH = self.causal_lm.model(input_ids=input_ids_BL, use_cache=False).last_hidden_state
        hidden_TH = hidden_BLH.flatten(0, 1).index_select(0, positions_T)
        return token_log_probs(self.causal_lm.lm_head(hidden_TH), token_ids_T, temperature=temperature)


def read_model_config(path: Path) -> PreTrainedConfig:
    """config.json of a model folder.

    Raises PathNotFound without the folder or the file, UnsupportedModel for an architecture that is not in ARCHITECTURES or weights
    that are quantized, InvalidArgument for a file that transformers cannot read.
    """
    if not (path / "config.json").is_file():
        raise PathNotFound(f"model.path: {path} is no Hugging Face model folder: config.json is missing", path=path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise _unreadable(path, error) from error
    architecture = next(iter(config.architectures or []), "none")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            f"the trainer does not know architecture {architecture}; it knows {known}", architecture=architecture
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            f"{path} holds quantized weights; the trainer needs floating-point ones", architecture=architecture
        )
    return config


def load_policy(
    path: Path,
    *,
    config: PreTrainedConfig,
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    region: AbstractContextManager[None],
    lora: LoraConfig | None = None,
    seed: int = 0,
) -> Policy:
    """The model in `path`, sharded over `mesh`. Every rank reads its own rows only. The shards are made inside `region`.

    param_dtype: of the shards; compute_dtype: of forward and backward. Gradients are summed over ranks, not averaged, in float32.
    lora: trains adapters alone, which begin as `seed` says. Raises as load_shards and add_adapters.
    Dropout is off, whatever `config` says: a token must have the same log-prob at every call, and the one it was sampled with.
    """
    config = _without_dropout(config)
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(
            config, dtype=param_dtype, attn_implementation=_ATTENTION[mesh.device_type]
        )
        if lora is not None:
            add_adapters(causal_lm, lora)
    policy = Policy(causal_lm)
    _shard(policy, mesh=mesh, compute_dtype=compute_dtype)
    device = mesh_device(mesh)
    with region:
        # FSDP2 also pads the shards here, so that they stay where they are from now on.
        policy.to_empty(device=device)
    # The one module with buffers; they follow from the configuration and are in no checkpoint.
    causal_lm.model.rotary_emb = type(causal_lm.model.rotary_emb)(config=config, device=device)
    load_shards(path, local_shards(causal_lm))
    initialize_adapters(causal_lm, seed=seed)
    return policy


def _shard(policy: Policy, *, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in policy.causal_lm.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without it a factor other than the number of ranks takes an NCCL-only operation.
            module.set_force_sum_reduction_for_comms(True)


def _without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy in which every dropout probability is 0."""
    copy = deepcopy(config)
    for name, value in vars(copy).items():
        if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
            setattr(copy, name, 0.0)
    return copy


def _unreadable(path: Path, error: Exception) -> InvalidArgument | UnsupportedModel:
    """transformers says ValueError both for a model type that it does not know and for a broken file."""
    first_line = str(error).splitlines()[0]
    if "model type" in first_line:
        known = ", ".join(ARCHITECTURES)
        return UnsupportedModel(f"{path}: {first_line} The trainer knows {known}", architecture="unknown")
    return InvalidArgument("model.path", f"{path}/config.json cannot be read: {first_line}")
