"""Choices of the export: what is published, whether it stays, and the ranks' GPUs, with the planner's account of each."""

import os
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tasuki.config.choices import Choices
from tasuki.config.gpus import Gpus, gpus_of, show_gpus
from tasuki.config.schema import NodeConfig
from tasuki.memory.arena import totals
from tasuki.planner.node import GB, Checkpointing, Node, Part, node_of
from tasuki.planner.plan import PLAN_STAGES, PlanStage, needed_bytes, plan
from tasuki.planner.presets import MODELS
from tasuki.trainer.resident_tags import ExportChoice
from tasuki.weights import chunk_memory
from tasuki.weights.chunk_memory import descriptor_problem
from tasuki.wire.errors import InternalError, InvalidArgument
from tasuki.wire.stages import Phase, Stage
from tests.planned import chosen_node, config_of, node_with
from tests.refusal import refusing

MODEL = MODELS["qwen2.5-7b"]
UUIDS = ["GPU-11111111-2222", "GPU-33333333-4444", "GPU-55555555-6666"]


def node(*, device: str = "cuda", trainer: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None) -> NodeConfig:
    return config_of(device=device, trainer=trainer or {}, rollout=rollout or {})


@pytest.mark.parametrize(
    ("param_dtype", "dtype", "expected"),
    [("float32", "bfloat16", False), ("float32", "float32", True), ("bfloat16", "bfloat16", True)],
)
def test_parameters_are_published_where_dtypes_are_equal(param_dtype: str, dtype: str, expected: bool) -> None:
    # SGLang's GPU kernels accept bfloat16 only.
    device = "cuda" if dtype == "bfloat16" else "cpu"
    assert node(device=device, trainer={"param_dtype": param_dtype}, rollout={"dtype": dtype}).exports_parameters is expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": {"devices": ["0"]}}, "trainer.devices needs rollout.devices, too"),
        ({"rollout": {"devices": ["0"]}}, "rollout.devices needs trainer.devices, too"),
        (
            {"device": "cpu", "trainer": {"devices": ["0"]}, "rollout": {"devices": ["0"]}},
            "trainer.devices needs device = .cuda",
        ),
        ({"trainer": {"devices": ["0", "1"]}, "rollout": {"devices": ["0"]}}, "trainer.devices names 2 GPUs for 1 ranks"),
        ({"trainer": {"devices": ["0"]}, "rollout": {"devices": [UUIDS[0]]}}, "UUIDs or numbers, not both"),
        ({"trainer": {"devices": ["1", "1"], "num_ranks": 2}}, "names one of them twice"),
        ({"trainer": {"devices": ["GPU-ab", "GPU-AB"], "num_ranks": 2}}, "names one of them twice"),
        ({"trainer": {"devices": ["GPU-ab"]}, "rollout": {"devices": ["GPU-abc"]}}, "name one GPU in two ways"),
        ({"trainer": {"devices": ["cuda:0"]}}, "should match pattern"),
        ({"trainer": {"devices": [1024]}}, "at most 1023"),
        ({"trainer": {"devices": ["9" * 5000]}}, "at most 1023"),
    ],
)
def test_choices_that_cannot_be_had_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        node(**settings)


# --- GPUs of the ranks


def test_by_default_every_rank_is_on_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    config = node(trainer={"num_ranks": 4}, rollout={"tp_size": 2, "dp_size": 1})
    assert gpus_of(config) == Gpus((), (0, 1, 2, 3), (0, 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    show_gpus(config)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_by_default_replicas_fill_the_gpus_of_the_trainer() -> None:
    def dp_size(**settings: Any) -> int:
        config = node(**settings)
        assert len(gpus_of(config).rollout) == config.num_engine_ranks == config.dp_size * config.rollout.tp_size
        return config.dp_size

    four = {"num_ranks": 4}
    assert dp_size(trainer=four) == 4
    assert dp_size(trainer=four, rollout={"tp_size": 2}) == 2
    assert dp_size(trainer=four, rollout={"tp_size": 4}) == 1
    assert dp_size(trainer=four, rollout={"tp_size": 8}) == 1
    assert dp_size(trainer=four, rollout={"dp_size": 2}) == 2
    assert dp_size(trainer=four, device="cpu") == 1
    assert dp_size(trainer={"devices": ["0"]}, rollout={"devices": ["0", "1", "2", "3"], "tp_size": 2}) == 2
    with pytest.raises(ValidationError, match="rollout.devices names 3 GPUs for 2 ranks"):
        node(trainer={"devices": ["0"]}, rollout={"devices": ["0", "1", "2"], "tp_size": 2})


def test_both_services_see_the_gpus_of_both_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    one_on_two = node(trainer={"devices": UUIDS[1:2]}, rollout={"tp_size": 2, "devices": UUIDS[:2]})
    assert gpus_of(one_on_two) == Gpus((UUIDS[1], UUIDS[0]), (0,), (1, 0))
    show_gpus(one_on_two)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == (f"{UUIDS[1]},{UUIDS[0]}", "PCI_BUS_ID")
    two_beside_one = node(trainer={"num_ranks": 2, "devices": ["3", "1"]}, rollout={"devices": ["0"]})
    assert gpus_of(two_beside_one) == Gpus(("3", "1", "0"), (0, 1), (2,))


def test_a_gpu_has_one_name() -> None:
    assert gpus_of(node(trainer={"devices": [1]}, rollout={"devices": [10]})).names == ("1", "10")
    numbers = node(trainer={"num_ranks": 2, "devices": [0, "01"]}, rollout={"devices": ["00"]})
    assert gpus_of(numbers) == Gpus(("0", "1"), (0, 1), (0,))
    uuids = node(trainer={"devices": ["GPU-ABC"]}, rollout={"devices": ["GPU-abc"]})
    assert gpus_of(uuids) == Gpus(("GPU-abc",), (0,), (0,))


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [
        ("4,7", (["1"], ["0"]), "7,4"),
        (" 4, 7 ", (["1"], ["1"]), "7"),
        (f"{UUIDS[2]},{UUIDS[0]}", (["0"], ["0"]), UUIDS[2]),
        (",".join(UUIDS), ([UUIDS[1]], [UUIDS[0]]), f"{UUIDS[1]},{UUIDS[0]}"),
        ("GPU-1,GPU-3", ([UUIDS[1]], [UUIDS[0]]), "GPU-3,GPU-1"),
        ("4,7", ([UUIDS[0]], [UUIDS[0]]), UUIDS[0]),
    ],
)
def test_gpus_are_some_of_those_that_the_scheduler_gave(
    visible: str, devices: tuple[list[str], list[str]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    show_gpus(node(trainer={"devices": devices[0]}, rollout={"devices": devices[1]}))
    # The scheduler's GPU numbers keep their meaning.
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == (expected, "FASTEST_FIRST")


@pytest.mark.parametrize(
    ("visible", "devices", "field"),
    [
        ("4,7", (["2"], ["0"]), "trainer.devices"),
        ("4,7", (["0"], ["4"]), "rollout.devices"),
        ("4,-1,7", (["1"], ["1"]), "trainer.devices"),
        ("", (["0"], ["0"]), "trainer.devices"),
        ("", ([UUIDS[0]], [UUIDS[0]]), "trainer.devices"),
        (UUIDS[0], ([UUIDS[0]], [UUIDS[1]]), "rollout.devices"),
        ("MIG-1", ([UUIDS[0]], [UUIDS[0]]), "trainer.devices"),
    ],
)
def test_a_gpu_that_the_scheduler_did_not_give_is_refused(
    visible: str, devices: tuple[list[str], list[str]], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with refusing(field):
        show_gpus(node(trainer={"devices": devices[0]}, rollout={"devices": devices[1]}))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


# --- the planner


def h200s(**trainer: Any) -> Node:
    """A 7B model on four GPUs."""
    return node_with(num_ranks=4, rollout={"kv_ratio": 0.6}, checkpointing=Checkpointing.FULL, trainer=trainer)


def present(layout: Node, part: Part) -> set[PlanStage]:
    """Stages in which the first GPU holds the part."""
    return {stage.stage for stage in plan(layout).stages if part in stage.gpus[0]}


RISING = {Stage.LOAD_WEIGHTS, Stage.RESUME_WEIGHTS, Stage.SYNC}


def test_a_copy_that_leaves_is_there_from_load_weights_to_sync_alone() -> None:
    assert present(h200s(), Part.EXPORT) == set(PLAN_STAGES)
    released = h200s().keeping(frozenset())
    assert present(released, Part.EXPORT) == RISING
    grown = needed_bytes(plan(released), Stage.LOAD_WEIGHTS).gpus[0]
    assert grown[Part.EXPORT] == pytest.approx(2 * MODEL.num_parameters / 4, rel=0.01)
    freed = plan(h200s()).stage(Phase.ROLLOUT).gpu_bytes - plan(released).stage(Phase.ROLLOUT).gpu_bytes
    assert freed == grown[Part.EXPORT]


def test_published_parameters_need_no_copy_and_stay_or_leave_themselves() -> None:
    in_place = h200s(param_dtype="bfloat16")
    assert present(in_place, Part.EXPORT) == set()
    assert present(in_place, Part.TRAINER_WEIGHTS) == set(PLAN_STAGES)
    assert Part.TRAINER_WEIGHTS not in plan(in_place).stage(Phase.ROLLOUT).host
    released = in_place.keeping(frozenset())
    assert Phase.ROLLOUT not in present(released, Part.TRAINER_WEIGHTS)
    assert Part.TRAINER_WEIGHTS in plan(released).stage(Phase.ROLLOUT).host


def test_without_descriptors_a_copy_that_stays_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InternalError("cuMemExportToShareableHandle: not supported")

    assert descriptor_problem(torch.device("cpu")) == ""
    monkeypatch.setattr(chunk_memory, "Import", refuse)
    before = totals()
    assert "not supported" in descriptor_problem(torch.device("cpu"))
    assert totals() == before
    in_place, choices = node(trainer={"param_dtype": "bfloat16"}), Choices(micro_batch_tokens=1, checkpointing="none")
    assert ExportChoice.of(in_place, choices, rank=0) == ExportChoice(of_parameters=True, stays=False)
    legacy = ExportChoice(of_parameters=False, stays=True, handles="ipc")
    assert ExportChoice.of(in_place, choices, rank=0, handles="ipc") == legacy
    merging = choices.model_copy(update={"merges_in_place": True})
    assert ExportChoice.of(in_place, merging, rank=0) == ExportChoice(of_parameters=True, stays=False, merges=True)
    with refusing("rollout.lora"):
        ExportChoice.of(in_place, merging, rank=0, handles="ipc")


def test_ranks_are_planned_on_the_gpus_that_they_have() -> None:
    config = node(trainer={"num_ranks": 2, "devices": ["2", "3"]}, rollout={"devices": ["0"]})
    planned = plan(chosen_node(config, MODEL))
    training, serving = planned.stage(Phase.TRAIN).gpus, planned.stage(Phase.ROLLOUT).gpus
    assert [Part.TRAINER_WEIGHTS in parts for parts in training] == [True, True, False]
    assert [Part.KV_CACHE in parts for parts in serving] == [False, False, True]
    alone = plan(chosen_node(node(), MODEL))
    assert planned.kv_pool.num_bytes >= alone.kv_pool.num_bytes, "no trainer is in the way there"
    with pytest.raises(InvalidArgument, match="trainer.devices: and rollout.devices name 3 GPUs, not 2"):
        node_of(config, MODEL, gpu_bytes=GB, host_bytes=GB, num_gpus=2)
