"""Checks of [trainer.lora] across keys and model."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from tasuki.models.adapter_folder import FUSED, in_peft, is_end, is_match
from tasuki.models.known import find_family
from tasuki.models.shape import EXPERTS
from tasuki.wire.errors import InvalidArgument

if TYPE_CHECKING:
    from tasuki.config.schema import NodeConfig
    from tasuki.config.trainer_schema import LoraConfig
    from tasuki.models.shape import ModelShape

Problem: TypeAlias = tuple[str, str]
"""The key to change first, and what is wrong with it."""


def conflicts_of_lora(config: "NodeConfig") -> Iterator[Problem]:
    """Words of one backend's adapters in the other's."""
    lora = config.trainer.lora
    if lora is None:
        return
    if lora.type == "vlm_lora":
        yield (
            "trainer.lora.type",
            '= "vlm_lora" is not offered: for a vision tower set trainer.lora.tower, with backend = "fsdp"',
        )
    words: tuple[tuple[str, str, bool, str], ...] = (
        ("megatron", "type", lora.type != "canonical_lora", "leave it out, or set use_dora for DoRA"),
        ("megatron", "dropout_position", lora.dropout_position != "pre", "leave it out"),
        ("megatron", "target_modules", lora.targets != lora.target_modules, "give PEFT's names"),
        ("megatron", "exclude_modules", lora.excluded != lora.exclude_modules, "give PEFT's names"),
        ("fsdp", "init", lora.is_pissa, "choose another"),
        ("fsdp", "tower", lora.tower, "leave it out"),
    )
    for backend, key, is_used, advice in words:
        if is_used and config.trainer.backend != backend:
            yield f"trainer.lora.{key}", f'is for trainer.backend = "{backend}" here: {advice}, or use that'


def check_lora_targets(model: "ModelShape", targets: Sequence[str]) -> None:
    """Raises InvalidArgument for a target that is no linear layer of the model, naming those that are."""
    there = list(dict.fromkeys(name for index in range(model.num_layers) for name in model.linear_layers(index)))
    missing = [target for target in targets if target not in there]
    if missing:
        has = f"it has {', '.join(there)}; those of experts are trainer.lora.experts"
        raise InvalidArgument("trainer.lora.target_modules", f"{model.architecture} has no linear {', '.join(missing)}; {has}")


def check_pissa(model: "ModelShape", lora: "LoraConfig", *, key: str) -> None:
    """Raises InvalidArgument for a rank above the number of a weight's components. key: of the rank."""
    for layer, shape in lora.layers(model).items():
        if lora.is_pissa and lora.rank_of(layer) > 2 * min(shape):
            problem = f"is above the {min(shape)} components of {layer}; lower it, or choose another init"
            raise InvalidArgument(key, problem)


def problems_of_lora_layers(lora: "LoraConfig", model: "ModelShape", *, is_whole: bool) -> Iterator[Problem]:
    """Names and patterns without effect. is_whole: whether layers that megatron-core computes as one have adapters only together."""
    adapted, targeted = lora.layers(model), lora.model_copy(update={"exclude_modules": ()}).layers(model)
    for name in lora.excluded:
        if not any(is_end(name, layer) for layer in targeted):
            problem = f"{name} is no layer of target_modules, nor the end of one such as {next(iter(targeted))}"
            yield "trainer.lora.exclude_modules", problem
    if not adapted:
        yield "trainer.lora.exclude_modules", "leaves no layer with an adapter; name fewer"
        return
    if is_whole:
        yield from _problems_of_fused_layers(lora, adapted)
    decoder = find_family(model.architecture).adapter_decoder(has_tower=model.tower is not None)
    for key, ends, matches in (
        ("exclude_modules", lora.excluded, is_end),
        ("rank_pattern", lora.rank_pattern, is_match),
        ("alpha_pattern", lora.alpha_pattern, is_match),
    ):
        for end, layer in product(ends, targeted):
            in_file = in_peft(layer, decoder=decoder).removeprefix("base_model.model.")
            if matches(end, layer) != matches(end, in_file):
                problem = f"{end} is for {layer}, which is {in_file} in PEFT's file, where it would not match"
                yield f"trainer.lora.{key}", f"{problem}; leave out its beginning"
    experts = [name for name in model.parameters() if lora.experts and name.endswith(EXPERTS)]
    for key, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            if any(is_match(pattern, name) for name in experts):
                yield f"trainer.lora.{key}", f"{pattern} matches experts, which all have rank and alpha"
            if not any(is_match(pattern, layer) for layer in adapted):
                problem = f"{pattern} matches no layer with an adapter, such as {next(iter(adapted))}"
                yield f"trainer.lora.{key}", f"{problem}; it must match the end of one"


def _problems_of_fused_layers(lora: "LoraConfig", adapted: Iterable[str]) -> Iterator[Problem]:
    """Layers that megatron-core computes as one, of which only some have an adapter, or have others' rank or scale."""
    for layer in adapted:
        before, _, last = layer.rpartition(".")
        parts = [f"{before}.{part}" for fused in FUSED.values() if last in fused for part in fused]
        for part in parts:
            if part not in adapted:
                problem = f"leaves out {part}, which is computed with {layer}; "
                yield "trainer.lora.target_modules", f'{problem}name both or neither, or type = "canonical_lora" without DoRA'
            for key, value in (("rank_pattern", lora.rank_of), ("alpha_pattern", lora.scaling_of)):
                if value(part) != value(layer):
                    yield f"trainer.lora.{key}", f"differs in {layer} and {part}, which share an A; give both the same"


def problems_of_lora_experts(config: "NodeConfig", models: "Sequence[ModelShape]") -> Iterator[Problem]:
    """Experts that cannot have adapters, and ranks that their grouped products cannot take. models: the policy's, and a critic's."""
    lora, critic_lora = config.trainer.lora, config.trainer.critic_lora
    if lora is None or not lora.experts:
        return
    for model in models if critic_lora else models[:1]:
        if not model.num_experts or model.has_biased_experts:
            what = "experts with biases, which cannot have adapters" if model.num_experts else "no experts"
            yield "trainer.lora.experts", f"{model.architecture} has {what}; remove it"
    # Rows of 16 bytes. A GPU in float32 has the limit of bfloat16.
    least = 4 if config.device == "cpu" and config.trainer.compute_dtype == "float32" else 8
    for key, adapters in (("lora.rank", lora), ("critic.lora_rank", critic_lora)):
        if adapters and adapters.rank % least:
            yield f"trainer.{key}", f"{adapters.rank} is not divisible by {least}, as grouped products of experts need"
