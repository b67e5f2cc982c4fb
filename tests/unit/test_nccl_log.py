"""Facts from NCCL's log. Lines follow the format strings of NCCL 2.28, with values for several kinds of network."""

import threading
import time

import pytest

from tasuki.trainer.replicas import call_within, transports
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
