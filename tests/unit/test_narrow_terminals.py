"""On a narrow terminal the tables of `state`, `watch`, `plan` and `doctor` show every name and figure whole."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from tasuki.cli.node_view import draw
from tasuki.cli.plan import Wishes, layout_of
from tasuki.cli.plan_report import show
from tasuki.node.node_snapshot import NodeSnapshot
from tasuki.planner.advice import advise
from tasuki.planner.plan import plan
from tasuki.v1 import coordinator_pb2, memory_pb2, rollout_pb2, trainer_pb2, types_pb2

GIB = 2**30
WIDTHS = (40, 60, 80)


def large_node() -> NodeSnapshot:
    """A node on a GPU of 141 GiB, whose sizes in MiB have six digits."""
    tag = types_pb2.TagUsage(
        tag=types_pb2.MEMORY_TAG_OPTIMIZER,
        device="cuda:0",
        total_bytes=121 * GIB,
        mapped_bytes=119 * GIB,
        kept_bytes=118 * GIB,
        host_copy_bytes=117 * GIB,
        is_paused=True,
    )
    device = types_pb2.DeviceUsage(
        device="cuda:0",
        process_bytes=131 * GIB,
        torch_cached_bytes=132 * GIB,
        other_processes_bytes=133 * GIB,
        free_bytes=134 * GIB,
        total_bytes=141 * GIB,
    )
    stage = coordinator_pb2.StageEvent(
        stage=types_pb2.STAGE_RESUME_WEIGHTS, status=coordinator_pb2.STAGE_STATUS_FAILED, seconds=123.456, bytes=135 * GIB
    )
    return NodeSnapshot(
        node=coordinator_pb2.NodeState(),
        trainer=trainer_pb2.GetTrainerStateResponse(num_parameters=7_615_616_512),
        rollout=rollout_pb2.GetRolloutStateResponse(),
        trainer_memory=memory_pb2.GetUsageResponse(tags=[tag], devices=[device]),
        rollout_memory=memory_pb2.GetUsageResponse(),
        changeovers=(coordinator_pb2.Changeover(stages=[stage]),),
        absent={},
    )


def lines_of(text: RenderableType, width: int) -> list[str]:
    shown = io.StringIO()
    Console(file=shown, width=width).print(text, highlight=False)
    return [line.rstrip() for line in shown.getvalue().splitlines()]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_nodes_state_shows_each_figure_whole(width: int) -> None:
    lines = lines_of(draw(large_node()), width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).replace(",", " ").split()
    sizes = [f"{size * GIB // 2**20}" for size in (117, 118, 119, 121, 131, 132, 133, 134, 141)]
    for figure in ("123.456", "138240.0", *sizes):
        assert figure in words
    assert {"RESUME_WEIGHTS", "FAILED", "optimizer", "(paused)", "cuda:0", "trainer"} <= set(words)
    assert "…" not in " ".join(lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan_shows_each_figure_whole(width: int) -> None:
    planned = plan(layout_of(None, Wishes(preset="balanced")))
    shown = io.StringIO()
    show(planned, advise(planned), console=Console(file=shown, width=width))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in shown.getvalue()
    assert {"RESUME_WEIGHTS", "LOAD_TRAINER"} <= set(shown.getvalue().split())
    assert any(line.startswith("    trainer ") for line in lines) is (width < 80)
