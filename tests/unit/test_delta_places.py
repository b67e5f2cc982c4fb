"""Places of deltas in a received manifest, and in the plan of a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tasuki.config.schema import NodeConfig
from tasuki.planner.layout import GB, Layout, Part
from tasuki.planner.node_plan import node_layout
from tasuki.planner.presets import MODELS
from tasuki.planner.trainer_bytes import export_arena
from tasuki.transport.manifest import DeltasPlace, Entry, Manifest, check, from_proto, to_proto
from tasuki.wire.errors import BadHandle

ENTRY = Entry("a", "bfloat16", (128,), (0,), (128,), 0)
GOOD = Manifest(0, 1, 512, (ENTRY,), deltas=DeltasPlace(0, 256, 256))


def test_places_of_deltas_survive_the_wire_and_are_part_of_the_digest() -> None:
    assert from_proto(to_proto(GOOD)) == GOOD
    assert GOOD.digest() != replace(GOOD, deltas=None).digest()


@pytest.mark.parametrize(
    "place",
    [
        DeltasPlace(0, 256, 0),
        DeltasPlace(0, 0, 256),
        DeltasPlace(0, 256, 512),
        DeltasPlace(0, 256, 300),
        DeltasPlace(0, 2**60, 256),
        DeltasPlace(256, 256, 0),
    ],
    ids=["overlap", "short", "outside", "unaligned", "huge", "elsewhere"],
)
def test_places_of_deltas_that_do_not_fit_are_refused(place: DeltasPlace) -> None:
    check(GOOD)
    with pytest.raises(BadHandle, match="deltas of bytes"):
        check(replace(GOOD, deltas=place))


def test_deltas_are_of_two_byte_elements() -> None:
    with pytest.raises(BadHandle, match="deltas of bytes"):
        check(replace(GOOD, entries=(replace(ENTRY, dtype="float32", global_shape=(64,), sizes=(64,)),)))


def layout(*, kv_ratio: float, residency: Any = None, **trainer: Any) -> Layout:
    """A node of eight GPUs of 80 GB."""
    config = NodeConfig.model_validate(
        {
            "state_dir": "s",
            "device": "cuda",
            "model": {"path": "m"},
            "trainer": {"num_ranks": 8, **trainer},
            "rollout": {"tp_size": 1, "kv_ratio": kv_ratio, "context_length": 8192},
            "residency": residency,
        }
    )
    return node_layout(config, MODELS["qwen2.5-7b"], gpu_bytes=80 * GB, host_bytes=2000 * GB)


def test_a_nodes_plan_has_a_quarter_more() -> None:
    whole, more = (export_arena(layout(kv_ratio=0.5, publish_deltas=publishes)) for publishes in (False, True))
    assert more == pytest.approx(1.25 * whole, rel=0.01)


@pytest.mark.parametrize("export_stays", [{}, {"export_stays": True}], ids=["open", "stays"])
def test_deltas_are_planned_only_where_they_leave_in_place_what_they_need(export_stays: dict[str, bool]) -> None:
    roomy, full, tight = (layout(kv_ratio=ratio, publish_deltas=True, **export_stays) for ratio in (0.5, 0.87, 0.91))
    assert roomy.publishes_deltas and not full.publishes_deltas and not tight.publishes_deltas
    # Their quarter would make a part of it leave.
    assert full.staying == layout(kv_ratio=0.87, **export_stays).staying
    assert {Part.EXPORT, Part.ROLLOUT_WEIGHTS} <= full.staying[0]


def test_a_residency_without_what_deltas_need_has_none() -> None:
    given = layout(kv_ratio=0.5, publish_deltas=True, residency={"trainer": [["export"]] * 8, "rollout": [[]] * 8})
    assert not given.publishes_deltas


def test_left_open_deltas_are_planned_where_nothing_else_changes() -> None:
    def is_planned(**settings: Any) -> bool:
        chosen = layout(**{"kv_ratio": 0.4, **settings})
        without = layout(**{"kv_ratio": 0.4, **settings, "publish_deltas": False})
        assert replace(chosen, publishes_deltas=False) == without
        return chosen.publishes_deltas

    assert is_planned()
    assert not is_planned(kv_ratio=0.3), "one layer less would keep everything"
    assert not is_planned(kv_ratio=0.91), "the copy leaves"
    for settings in ({"export_stays": False}, {"export_handles": "ipc"}, {"param_dtype": "bfloat16"}, {"lora": {"rank": 8}}):
        assert not is_planned(**settings)
    given = layout(kv_ratio=0.4, residency={"trainer": [["export"]] * 8, "rollout": [["weights"]] * 8})
    assert not given.publishes_deltas, "where residency is given, deltas are too"


def test_a_single_replica_reads_from_its_own_gpus() -> None:
    node = NodeConfig.model_validate(
        {"state_dir": "s", "device": "cuda", "model": {"path": "m"}, "trainer": {"num_ranks": 2}, "rollout": {"tp_size": 2}}
    )
    assert not node.may_publish_deltas
    both = {"rollout": {"tp_size": 1, "dp_size": 2}}
    assert node.model_validate({**node.model_dump(), **both}).may_publish_deltas
    assert not node.model_validate({**node.model_dump(), **both, "device": "cpu"}).may_publish_deltas
