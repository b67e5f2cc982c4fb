"""Experts spread over two ranks against experts gathered on each: steps, checkpoints, published and exported weights.

Steps against plain torch are in test_trainer_exactness.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.backends.fsdp.shards import local_shards
from tasuki.trainer.data.samples import Samples
from tasuki.trainer.learner import Learner
from tasuki.trainer.modules.routing import ExpertLoad, Router, replace_routers
from tasuki.trainer.resident_tags import TAGS
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.wire.stages import MemoryTag
from tests.extent import IS_WHOLE, crossed
from tests.integration.launched import run_ranks
from tests.integration.learning import fsdp, learn, metric, start_learner, trained, whole_gradients, whole_parameters
from tests.integration.plain_critic import add_head
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE, make_model, save_checkpoint

NUM_EXPERTS = {"qwen3_moe": "num_experts", "mixtral": "num_local_experts"}
CASES = crossed(NUM_EXPERTS, ("none", "full"))
NUM_LAYERS = 2
EXPERT_ELEMENTS = {"qwen3_moe": 4 * 3 * 32 * 64, "mixtral": 4 * 3 * 96 * 64}


NUM_STEPS, MAX_TOKENS = 20 if IS_WHOLE else 6, 48
# A large eps, so that rounding does not decide a step: otherwise Adam's first step is the sign of the gradient.
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "eps": 1e-3, "weight_decay": 0.01}
Facts = dict[str, Any]


class Collectives(TorchDispatchMode):
    """Counts collectives in the block: the number of all-to-alls, and the elements that FSDP2 gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_exchanges, self.num_gathered = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        self.num_exchanges += "alltoall" in name
        self.num_gathered += args[0].numel() if "allgather_base" in name else 0
        return function(*args, **(kwargs or {}))


def samples_of(step: int) -> Samples:
    """Makes samples for several micro-batches, with prompts shared by pairs. Every fifth step has a single sample, so that one rank has
    only tokens that do not count.
    """
    samples = make_samples(1 if step % 5 == 4 else 9, vocab_size=VOCAB_SIZE, seed=step, temperature=0.8)
    for one, other in zip(samples[::2], samples[1::2], strict=False):
        other.prompt_token_ids[:] = one.prompt_token_ids
    for sample in samples:
        sample.values[:] = [0.1] * len(sample.completion_token_ids)
        sample.returns[:] = [0.5] * len(sample.completion_token_ids)
    return decode_samples(samples)


def step_of(learner: Learner, step: int) -> tuple[float, float, float]:
    """Makes a step; returns its loss, gradient norm and the load of the busiest expert."""
    report = learn(learner, Role.POLICY, samples_of(step), config=LossConfig(), max_tokens=MAX_TOKENS)
    return report.loss, learner.optim_step(Role.POLICY).grad_norm, metric(report, "expert_load_max")


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other)
    return max(float((one[name] - tensor).abs().max()) for name, tensor in other.items())


def have_equal_shards(one: Learner, other: Learner) -> bool:
    """Whether the shards that both learners publish are equal on every rank."""
    ours, theirs = (local_shards(trained(each, Role.POLICY).network.causal_lm) for each in (one, other))
    places = [[(shard.name, shard.global_shape, shard.offsets) for shard in shards] for shards in (ours, theirs)]
    is_equal = places[0] == places[1] and all(torch.equal(a.local, b.local) for a, b in zip(ours, theirs, strict=True))
    everyone = [False, False]
    dist.all_gather_object(everyone, is_equal)
    return all(everyone)


def compare_steps(start: Callable[..., Learner], output: Path) -> Facts:
    """Makes NUM_STEPS steps of both, loads each one's checkpoint into the other, and makes another step."""
    gathered, spread = start(), start(expert_parallel=True)
    facts: Facts = {"loaded": [have_equal_shards(gathered, spread)], "steps": [], "parameters": []}
    for step in range(NUM_STEPS):
        for learner in (gathered, spread) if step == NUM_STEPS // 2 else ():
            # as in a changeover
            fsdp(learner).memory.pause_tags(TAGS)
            fsdp(learner).memory.resume_tags(TAGS)
        facts["steps"].append([step_of(gathered, step), step_of(spread, step)])
    before = {name: whole_parameters(each, Role.POLICY) for name, each in (("gathered", gathered), ("spread", spread))}
    facts["parameters"].append(largest_difference(before["spread"], before["gathered"]))
    facts["tags"] = [
        {MemoryTag.of(usage.tag): usage.total_bytes for usage in fsdp(each).memory.usage()} for each in (gathered, spread)
    ]
    for name, learner in (("gathered", gathered), ("spread", spread)):
        learner.save_checkpoint(output / name)
    gathered.load_checkpoint(output / "spread")
    facts["crossed"] = [largest_difference(whole_parameters(gathered, Role.POLICY), before["spread"])]
    facts["loaded"].append(have_equal_shards(gathered, spread))
    for name, learner in (("gathered", gathered), ("spread", spread)):
        fsdp(learner).export_model(output / f"{name}-model")
    exported = [load_file(output / f"{name}-model" / "model.safetensors") for name in before]
    facts["exported"] = exported[0].keys() == exported[1].keys() and all(
        torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items()
    )
    spread.load_checkpoint(output / "gathered")
    facts["crossed"].append(largest_difference(whole_parameters(spread, Role.POLICY), before["gathered"]))
    # with the other learner's moments
    gathered.load_checkpoint(output / "gathered")
    facts["steps"].append([step_of(gathered, NUM_STEPS), step_of(spread, NUM_STEPS)])
    facts["parameters"].append(
        largest_difference(whole_parameters(spread, Role.POLICY), whole_parameters(gathered, Role.POLICY))
    )
    return facts


def count_collectives(start: Callable[..., Learner]) -> Facts:
    """Counts collectives of a step with one micro-batch."""
    facts: Facts = {}
    for name, settings in (("gathered", {}), ("spread", {"expert_parallel": True})):
        learner = start(**settings)
        learn(learner, Role.POLICY, samples_of(0), config=LossConfig())
        with Collectives() as seen:
            learn(learner, Role.POLICY, samples_of(0), config=LossConfig())
        facts[name] = [seen.num_exchanges, seen.num_gathered]
    return facts


def compare_gradients(start: Callable[..., Learner], **settings: Any) -> float:
    """Returns the largest difference of a gradient, relative to its norm or to a thousandth of the largest norm."""
    gradients: list[dict[str, Tensor]] = []
    for is_spread in (False, True):
        learner = start(expert_parallel=is_spread, **settings)
        learn(learner, Role.POLICY, samples_of(0), config=LossConfig(), max_tokens=MAX_TOKENS)
        gradients.append(whole_gradients(learner, Role.POLICY))
    gathered, spread = gradients
    assert list(gathered) == list(spread)
    scale = max(float(tensor.norm()) for tensor in gathered.values())
    return max(float((spread[name] - each).norm()) / (float(each.norm()) + 1e-3 * scale) for name, each in gathered.items())


def run_cases(mesh: DeviceMesh, models: Path, output: Path) -> None:
    for kind, rung in CASES:
        run_case(mesh, models / kind, rung, output / f"{kind}-{rung}")


def run_case(mesh: DeviceMesh, model: Path, rung: str, output: Path) -> None:
    """Rank 0 writes the facts."""
    output.mkdir(exist_ok=True)

    def start(**settings: Any) -> Learner:
        return start_learner(model, mesh=mesh, **{"checkpointing": rung, **SETTINGS, **settings})

    facts: Facts = {"steps": compare_steps(start, output), "collectives": count_collectives(start)}
    facts |= {
        "bfloat16": compare_gradients(start, compute_dtype="bfloat16"),
        "lora": compare_gradients(start, lora={"rank": 4, "target_modules": ["q_proj", "o_proj"]}),
    }
    if dist.get_rank() == 0:
        output.with_suffix(".json").write_text(json.dumps(facts))


def check_load(mesh: DeviceMesh) -> None:
    """Counts of ranks add up before they are compared."""
    model = make_model("mixtral", seed=5)
    replace_routers(model)
    load = ExpertLoad(model, mesh=mesh, device=torch.device("cpu"))
    for router in model.modules():
        if isinstance(router, Router):
            # Over both ranks: 4, 2, 2, 0, 0.
            router.load_E += torch.tensor([[3, 0, 1, 0, 0], [1, 2, 1, 0, 0]][dist.get_rank()])
    metrics = load.take()
    assert (metrics["expert_load_max"].total, metrics["expert_load_max"].weight) == (2.5, 1.0)
    assert metrics["idle_expert_fraction"].value == pytest.approx(0.4)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """Facts by family and checkpointing, from one launch."""
    folder, output = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("facts")
    for kind, key in NUM_EXPERTS.items():
        add_head(save_checkpoint(make_model(kind, seed=3, **{key: 4}), folder / kind))
    run_ranks(run_cases, folder, output, num_ranks=2)
    return {(kind, rung): json.loads((output / f"{kind}-{rung}.json").read_text()) for kind, rung in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_those_of_gathered_experts(facts: dict[Any, Any], case: tuple[str, str]) -> None:
    found = facts[case]["steps"]
    for gathered, spread in found["steps"]:
        assert spread == pytest.approx(gathered, rel=1e-4, abs=1e-5)
    assert max(found["parameters"]) < 1e-5
    assert found["tags"][0] == found["tags"][1] and found["tags"][1]["weights"] > 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_checkpoint_goes_on_either_way(facts: dict[Any, Any], case: tuple[str, str]) -> None:
    assert facts[case]["steps"]["crossed"] == [0.0, 0.0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_published_and_exported_is_the_same(facts: dict[Any, Any], case: tuple[str, str]) -> None:
    assert facts[case]["steps"]["loaded"] == [True, True]
    assert facts[case]["steps"]["exported"] is True


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_travel_and_experts_do_not(facts: dict[Any, Any], case: tuple[str, str]) -> None:
    kind, rung = case
    collectives = facts[case]["collectives"]
    (no_exchanges, num_gathered), (num_exchanges, num_other) = collectives["gathered"], collectives["spread"]
    # Row counts, rows to the experts and back, each again where the layer is recomputed; gradients both ways.
    assert (no_exchanges, num_exchanges) == (0, NUM_LAYERS * (8 if rung == "full" else 5))
    # in forward and in backward
    assert num_gathered - num_other == 2 * NUM_LAYERS * EXPERT_ELEMENTS[kind]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_and_adapters_beside_spread_experts(facts: dict[Any, Any], case: tuple[str, str]) -> None:
    assert facts[case]["bfloat16"] < 0.02
    assert facts[case]["lora"] < 1e-4


def test_the_load_is_that_of_all_ranks() -> None:
    run_ranks(check_load, num_ranks=2)
