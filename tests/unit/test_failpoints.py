"""TASUKI_FAILPOINTS: a failpoint that no process reaches is refused when the node starts."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from tasuki.config.schema import NodeConfig
from tasuki.rpc.failpoints import check_failpoints
from tasuki.v1 import trainer_pb2
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import RULES, Stage
from tests.refusal import refusing


def check(folder: Path, spec: str, **trainer: Any) -> None:
    tables: dict[str, Any] = {"state_dir": folder, "model": {"path": folder}, "trainer": trainer}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TASUKI_FAILPOINTS", f"rollout@SYNC:9=kill, {spec}")
        check_failpoints(NodeConfig.model_validate(tables))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("rubbish", "is not PROCESS@POINT"),
        ("rollout@SYNC=explode", "with an action of kill, stop"),
        ("rollout@SYNC:0=kill", "is not PROCESS@POINT"),
        ("rollout@SYNC=slow(trainer0)", "only kill and stop support"),
        (
            "nosuch9@POINT=kill",
            "names nosuch9, but the node's processes are coordinator, trainer, trainer0, rollout, scheduler0",
        ),
        ("trainer1@optim_step=kill", "names trainer1"),
        ("coordinator@SYNC.intended=kill(scheduler1)", "names scheduler1"),
        ("trainer@SYNC=kill", "trainer can kill at LOAD_WEIGHTS, LOAD_WEIGHTS.done, OFFLOAD"),
        ("trainer0@stop=kill", "trainer0 can kill at forward_backward"),
        ("scheduler0@optim_step=hang", "scheduler0 can hang at receive"),
        ("coordinator@SYNC=kill", "coordinator can kill at LOAD_WEIGHTS.intend"),
        ("rollout@SYNC=corrupt", "rollout can corrupt at no point"),
        ("coordinator@SYNC.note=corrupt", "coordinator can corrupt at no point"),
        ("trainer0@optim_step=corrupt", "trainer0 can corrupt at publish_weights"),
    ],
)
def test_a_failpoint_that_nothing_comes_to_is_refused(tmp_path: Path, spec: str, problem: str) -> None:
    with refusing("TASUKI_FAILPOINTS") as refused:
        check(tmp_path, spec)
    assert repr(spec) in refused.value.message and problem in refused.value.message


def test_failpoints_are_at_every_stage_and_every_command(tmp_path: Path) -> None:
    stages = {(rule.service.value, rule.stage.value) for rule in RULES.values()}
    commands = {("trainer", method.name) for method in _commanded(trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"])}
    points = stages | commands - {("trainer", "PublishWeights")}  # that is, LOAD_WEIGHTS
    points |= {("coordinator", f"{stage}.intend") for stage in Stage}
    for process in ("trainer", "rollout", "coordinator"):
        for point in {point for _, point in points}:
            if (process, point) in points:
                check(tmp_path, f"{process}@{point}=kill")
            else:
                with pytest.raises(InvalidArgument, match="names an unknown point"):
                    check(tmp_path, f"{process}@{point}=kill")


def _commanded(service: ServiceDescriptor) -> list[MethodDescriptor]:
    """Methods whose request, or its header, carries a command."""

    def is_commanded(method: MethodDescriptor) -> bool:
        fields = method.input_type.fields_by_name
        message = fields["header"].message_type if "header" in fields else method.input_type
        return message is not None and "command" in message.fields_by_name

    return [method for method in service.methods if is_commanded(method)]


def test_published_parameters_are_not_damaged(tmp_path: Path) -> None:
    check(tmp_path, "trainer0@publish_weights=corrupt")
    with pytest.raises(InvalidArgument, match="trainer.param_dtype to differ from rollout.dtype"):
        check(tmp_path, "trainer0@publish_weights=corrupt", param_dtype="bfloat16")
