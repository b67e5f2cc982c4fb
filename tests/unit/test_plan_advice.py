"""Advice for plans that do not fit, against every combination of the choices."""

from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as some

from tasuki.config.load import changed
from tasuki.planner.advice import Choice, Cost, advise, choices
from tasuki.planner.choose import choose
from tasuki.planner.node import GB, Node, node_of
from tasuki.planner.plan import Plan, plan
from tasuki.planner.presets import MODELS
from tasuki.wire.errors import InvalidArgument
from tests.extent import examples
from tests.planned import node_with


def planned_with(node: Node, values: dict[str, object]) -> Plan | None:
    """The plan with other values of keys; None if they are refused."""
    try:
        config = changed(node.config, values)
        other = node_of(config, node.model, gpu_bytes=node.gpu_bytes, host_bytes=node.host_bytes, num_gpus=node.num_gpus)
        return plan(choose(other))
    except InvalidArgument:
        return None


def cost_of(keys: list[str], known: list[Choice], values: dict[str, object]) -> tuple[Cost, int, list[int]]:
    """The stated order: the costliest key's cost, the number of keys, and their places in the list."""
    places = [
        number
        for number, choice in enumerate(known)
        if choice.key in keys and (choice.values == (None,) or values[choice.key] in choice.values)
    ]
    return max((known[place].cost for place in places), default=Cost.NOTHING), len(keys), places


def cheaper_combination(planned: Plan, than: tuple[Cost, int, list[int]]) -> dict[str, object] | None:
    """A combination of choices that fits and costs less, with a few values of the KV ratio; None without one."""
    known = choices(planned)
    options: dict[str, list[object]] = {}
    for choice in known:
        options.setdefault(choice.key, [None]).extend(choice.values if choice.values != (None,) else (0.3, 0.6))
    for combination in product(*options.values()):
        values = {key: value for key, value in zip(options, combination, strict=True) if value is not None}
        if cost_of(list(values), known, values) < than:
            tried = planned_with(planned.node, values)
            if tried is not None and tried.fits:
                return values
    return None


@settings(max_examples=examples(48), deadline=None, derandomize=True)
@given(
    gpu_gb=some.integers(8, 30),
    host_gb=some.sampled_from((14, 30, 2000)),
    is_pair=some.booleans(),
    adapters=some.sampled_from((None, "merged", "adapter")),
    moments=some.sampled_from(("gpu", "host", "8bit")),
)
def test_advice_is_the_least_of_all_combinations_that_fit(
    gpu_gb: int, host_gb: int, is_pair: bool, adapters: str | None, moments: str
):
    model = replace(MODELS["qwen2.5-7b"], num_layers=2, context_length=1024)
    node = node_with(
        model,
        num_ranks=1 + is_pair,
        gpu_bytes=gpu_gb * GB,
        host_bytes=host_gb * GB,
        trainer={"moments": moments} | ({} if adapters is None else {"lora": {"rank": 16}}),
        rollout={"lora": adapters or "merged", "max_running_requests": 64, "engine": {"disable_cuda_graph": is_pair}},
    )
    planned = plan(choose(node))
    advice = advise(planned)
    if planned.fits:
        assert not advice.ladder
        return
    # As a user applies it: the printed values.
    values = {rung.setting: _typed(rung.new) for rung in advice.ladder}
    assert cheaper_combination(planned, cost_of(list(values), choices(planned), values) if values else _NONE) is None
    applied = planned_with(planned.node, values)
    assert not values or (applied is not None and applied.fits)


_NONE = (Cost.METHOD, 99, list[int]())
"""Dearer than any combination."""


def _typed(text: str) -> object:
    return {"true": True, "unset": None}.get(text, int(text) if text.isdecimal() else float(text) if "." in text else text)


def test_adapters_come_with_the_keys_that_they_need():
    # A reference of its own is refused beside adapters, experts cannot have any, and adapters are trained in float32.
    node = node_with(
        "qwen3-30b-a3b", num_ranks=8, gpu_bytes=30 * GB, trainer={"reference_on_host": False, "param_dtype": "bfloat16"}
    )
    ladder = advise(plan(choose(node))).ladder
    assert ladder[-1].plan.fits
    new = {rung.setting: rung.new for rung in ladder}
    assert (
        new.items()
        >= {
            "trainer.reference_on_host": "unset",
            "trainer.param_dtype": "float32",
            "trainer.lora.target_modules": '["q_proj", "k_proj", "v_proj", "o_proj"]',
            "trainer.lora.rank": "32",
        }.items()
    )


def test_requests_that_a_step_never_makes_are_no_loss():
    # 64 samples a step, and 256 requests by default: room for the others costs sampling's logits.
    train = {
        "prompts_per_step": 8,
        "group_size": 8,
        "num_steps": 1,
        "dataset": "d",
        "output_dir": "o",
        "reward": {"function": "r.py:f"},
    }
    few, many = (
        {choice.key: choice for choice in choices(plan(choose(node_with(train=train | {"group_size": size}))))}
        for size in (8, 64)
    )
    assert (few["rollout.max_running_requests"].cost, few["rollout.max_running_requests"].values) == (Cost.NOTHING, (64,))
    assert "rollout.max_running_requests" not in many


def test_layouts_of_the_configured_backend_are_tried() -> None:
    layout = {"tensor_parallel": 2, "expert_parallel": 2}
    node = node_with("qwen3-30b-a3b", num_ranks=8, trainer={"backend": "megatron", "megatron": layout})
    tried = {choice.key: choice.values for choice in choices(plan(node))}
    assert tried["trainer.megatron.expert_parallel"] == tried["trainer.megatron.tensor_parallel"] == (4, 8)
    assert not {"trainer.sequence_parallel", "trainer.expert_parallel"} & tried.keys()
