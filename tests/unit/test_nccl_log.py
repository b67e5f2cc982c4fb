"""Facts from NCCL's log. Lines follow the format strings of NCCL 2.28, with values for several kinds of network."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tasuki.config.fleet_schema import FleetConfig
from tasuki.trainer.backends.fsdp.nccl_log import transports
from tasuki.trainer.backends.fsdp.replicas import call_within
from tasuki.trainer.environment import nccl_log_variables, socket_variables
from tests.limits import limit_s

HEAD = "node-a:411:523 [0] NCCL"


@pytest.mark.parametrize(
    ("line", "transport"),
    [
        ("Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0", "NET/Socket"),
        ("Channel 01/0 : 0[0] -> 1[0] [send] via NET/IB/3/GDRDMA", "NET/IB/GDRDMA"),
        ("Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/3(1)/GDRDMA", "NET/IB/GDRDMA"),
        ("Channel 00/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/0/GDRDMA/Shared", "NET/AWS Libfabric/GDRDMA/Shared"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "P2P/CUMEM"),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", "SHM/direct/direct"),
        ("CollNet 00/0 : 0 [send] via COLLNET/SHARP/0", "COLLNET/SHARP"),
    ],
)
def test_the_transport_of_a_channel_is_named_without_its_device(line: str, transport: str) -> None:
    assert transports(f"{HEAD} INFO Bootstrap: Using eth0:10.0.0.1<0>\n{HEAD} INFO {line}\n") == [transport]


def test_a_call_that_does_not_return_is_left_behind() -> None:
    started, ends = time.monotonic(), threading.Event()
    with pytest.raises(TimeoutError):
        call_within(0.05, ends.wait)
    assert time.monotonic() - started < limit_s(5.0)
    ends.set()
    assert call_within(5, lambda: 7) == 7
    with pytest.raises(ValueError, match="bad"):
        call_within(5, lambda: int("bad"))


def test_a_fleet_alone_has_an_interface_and_a_log(tmp_path: Path) -> None:
    fleet = FleetConfig(name="lab", num_nodes=2, node_rank=0, leader="node-a:1")
    on_eth0, alone = fleet.model_copy(update={"interface": "eth0"}), fleet.model_copy(update={"num_nodes": 1})
    assert socket_variables(on_eth0)["NCCL_SOCKET_IFNAME"] == "=eth0"  # not eth01
    assert "NCCL_SOCKET_IFNAME" not in socket_variables(fleet)  # set by the user, or chosen by NCCL
    assert socket_variables(alone)["NCCL_SOCKET_IFNAME"] == socket_variables(None)["NCCL_SOCKET_IFNAME"] == "lo"
    path = tmp_path / "50%" / "nccl0.log"
    assert nccl_log_variables(fleet, path=path) == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/50%%/nccl0.log"}
    assert nccl_log_variables(alone, path=path) == nccl_log_variables(None, path=path) == {}
