"""A family's description of a model against the module in transformers."""

import json
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasuki.models.family import Model
from tasuki.models.known import FAMILIES, find_family, read_model
from tasuki.models.shape import LAYER_SCALAR
from tasuki.models.tower import TOWER
from tasuki.trainer.attention.packed import IMPLEMENTATION, PackedAttention
from tasuki.trainer.backends.fsdp.model import Policy, check_module, set_buffers
from tasuki.trainer.data.micro_batch import TokenBatch
from tasuki.wire.errors import InvalidArgument, UnsupportedModel
from tests.models import CONFIGS, make_model

CPU = torch.device("cpu")


def module_of(kind: str, *, device: str = "meta", **changes: Any) -> PreTrainedModel:
    config = CONFIGS[kind]()
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device(device):
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    module.config.architectures = config.architectures or [find_family(type(module).__name__).architecture]
    return module


def table_of(module: PreTrainedModel, **changes: Any) -> dict[str, Any]:
    """Returns a config.json for the module."""
    return module.config.to_dict() | {"architectures": module.config.architectures} | changes


def model_of(module: PreTrainedModel) -> Model:
    return read_model(table_of(module))


def test_every_family_has_a_tiny_model_that_is_tested() -> None:
    assert {module_of(kind).config.architectures[0] for kind in CONFIGS} == FAMILIES.keys()


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_and_buffers_are_those_of_the_module(kind: str) -> None:
    module = module_of(kind)
    model = model_of(module)
    assert model.shape.parameters() == {name: tuple(param.shape) for name, param in module.named_parameters()}
    assert model.buffers() == {name for name, _ in module.named_buffers()}
    check_module(module, model)


_WRONG = (None, False, 0, 1, 7, 0.5, 1.5, "x", [], {}, ["full_attention"], {"0": 1}, {"full_attention": 1})


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_transformers_refuses_of_a_configuration_is_refused_without_it(kind: str) -> None:
    """Every key with values of every type."""
    config = CONFIGS[kind]()
    table = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(module_of(kind)).__name__]}
    read_model(table)
    for key, own in table.items():
        inner = [own | {name: value} for name in own for value in _WRONG] if isinstance(own, dict) else []
        for value in (*_WRONG, *inner, *([own[1:]] if isinstance(own, list) else [])):
            changed = table | {key: value}
            with suppress(InvalidArgument, UnsupportedModel):
                read_model(changed)
                type(config).from_dict(changed)  # raises nothing either


@pytest.mark.parametrize("kind", CONFIGS)
def test_buffers_have_their_values_after_a_module_was_emptied(kind: str) -> None:
    expected = dict(module_of(kind, device="cpu").named_buffers())
    module = module_of(kind)
    module.to_empty(device=CPU)
    for buffer in module.buffers():
        buffer.fill_(float("nan"))
    set_buffers(module, model_of(module), device=CPU)
    found = dict(module.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        if name.endswith(LAYER_SCALAR):
            continue  # which a checkpoint has
        assert torch.equal(buffer, expected[name]) and buffer.dtype == expected[name].dtype, name


SCORED = [torch.tensor([3, 17, 45, 9, 88, 61, 17, 30, 29, 101, 7, 12]), torch.tensor([5, 6, 99, 4, 4, 71, 13])]


def scores(policy: Policy) -> torch.Tensor:
    """Log-probs of all tokens but the first, for both sequences in one batch; logits are divided by 0.7."""
    lengths = torch.tensor([len(tokens) - 1 for tokens in SCORED])
    positions = torch.cat([torch.arange(length) for length in lengths])
    batch = TokenBatch(
        input_ids_T=torch.cat([tokens[:-1] for tokens in SCORED]),
        position_ids_T=positions,
        cu_seqlens_S=torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32),
        max_seqlen=int(lengths.max()),
        places_N=torch.arange(len(positions)),
        token_ids_N=torch.cat([tokens[1:] for tokens in SCORED]),
        temperature_N=torch.full((len(positions),), 0.7),
        num_places=(len(positions),),
    )
    with torch.no_grad():
        return policy(batch)[0]


def plain_scores(module: PreTrainedModel) -> torch.Tensor:
    """Log-probs by transformers alone, one sequence at a time."""
    parts = []
    for tokens in SCORED:
        with torch.no_grad():
            log_probs = torch.log_softmax(module(input_ids=tokens[None]).logits[0, :-1] / 0.7, dim=-1)
        parts.append(log_probs.gather(-1, tokens[1:, None])[:, 0])
    return torch.cat(parts)


def loaded(kind: str) -> PreTrainedModel:
    """Loads a model with large weights and transformers' own attention."""
    module = make_model(kind, seed=7)
    module.set_attn_implementation("eager")
    return module.eval()


def policy_of(module: PreTrainedModel, **settings: float | None) -> Policy:
    """Builds the policy with the trainer's attention, as on a CPU, and the trainer's head instead of the module's."""
    attention = PackedAttention("sdpa", model_of(module).attention)
    module.set_attn_implementation(IMPLEMENTATION)
    return Policy(module, attention=attention, **settings)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_policy_scores_as_transformers_and_a_poisoned_buffer_shows(kind: str) -> None:
    module = loaded(kind)
    model = model_of(module)
    expected = plain_scores(module)
    policy = policy_of(module, final_logit_softcap=model.final_logit_softcap)
    torch.testing.assert_close(scores(policy), expected, rtol=1e-5, atol=1e-5)
    for name in model.buffers():
        if name.endswith("original_inv_freq") or name.startswith(TOWER):
            continue  # the copy to which "dynamic" and "longrope" return; what only images pass (test_tower.py)
        if name == f"model.layers.{model.shape.num_layers - 1}.{LAYER_SCALAR}":
            continue  # the last norm hides it
        buffer = module.get_buffer(name)
        right = buffer.clone()
        buffer.mul_(1.5)
        assert not torch.allclose(scores(policy), expected, atol=1e-2), f"{name} is not seen"
        buffer.copy_(right)
    torch.testing.assert_close(scores(policy), expected, rtol=1e-5, atol=1e-5)


def test_a_buffer_that_nobody_has_accounted_for_is_refused() -> None:
    module = module_of("llama")
    module.model.layers[1].mlp.register_buffer("gain", torch.ones(1, device="meta"))
    with pytest.raises(UnsupportedModel, match=r"buffer model\.layers\.1\.mlp\.gain is there in transformers and absent"):
        check_module(module, model_of(module))


def test_a_parameter_that_nobody_has_accounted_for_is_refused() -> None:
    module = module_of("llama")
    module.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.ones(4, device="meta"))
    with pytest.raises(
        UnsupportedModel, match=r"parameter model\.layers\.0\.self_attn\.sinks is \[4\] in transformers and absent"
    ):
        check_module(module, model_of(module))
