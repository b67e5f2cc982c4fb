"""Addresses, and chunks of messages."""

from pathlib import Path

import pytest

from tasuki.rpc.commands import chunks
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.address import is_beyond_loopback, reachable, socket_folder, unix_target
from tasuki.wire.channel import MAX_CHUNK_BYTES


def test_chunks_fit_a_message_and_keep_the_order() -> None:
    samples = [TrainingSample(prompt_token_ids=[1], completion_token_ids=[70000] * 60_000) for _ in range(20)]
    cut = list(chunks(samples))
    assert [one for chunk in cut for one in chunk] == samples
    assert len(cut) > 1 and all(sum(one.ByteSize() for one in chunk) <= MAX_CHUNK_BYTES for chunk in cut)
    assert list(chunks([])) == []


DEEP = Path("/" + "/".join(["a-long-folder-name"] * 6))


def test_sockets_stand_below_a_short_state_folder() -> None:
    assert unix_target(Path("/srv/node"), service="trainer") == "unix:/srv/node/run/trainer.sock"


def test_a_socket_below_a_deep_state_folder_has_a_path_that_a_socket_can_have() -> None:
    longest = socket_folder(DEEP) / ("x" * 40)
    assert len(str(longest)) < 108
    assert socket_folder(DEEP) != socket_folder(DEEP / "b")


def test_both_ends_agree_whatever_their_temporary_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen_by_client = socket_folder(DEEP)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert socket_folder(DEEP) == seen_by_client


@pytest.mark.parametrize(
    ("target", "seen_from", "reached"),
    [
        ("0.0.0.0:5001", "node-a:5000", "node-a:5001"),
        ("[::]:5001", "[fd00::7]:5000", "[fd00::7]:5001"),
        ("0.0.0.0:5001", "unix:/run/coordinator.sock", "127.0.0.1:5001"),
        ("10.0.0.5:5001", "node-a:5000", "10.0.0.5:5001"),
        ("unix:/run/trainer.sock", "node-a:5000", "unix:/run/trainer.sock"),
    ],
)
def test_a_service_on_every_address_is_reached_where_the_coordinator_was(target: str, seen_from: str, reached: str) -> None:
    assert reachable(target, seen_from=seen_from) == reached


@pytest.mark.parametrize("target", ["127.0.0.1:1", "127.9.9.9:1", "localhost:65535", "[::1]:5", "unix:/run/a.sock"])
def test_loopback_is_no_further(target: str) -> None:
    assert not is_beyond_loopback(target)


@pytest.mark.parametrize(
    "target",
    ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "node:1", "localhost", "127.0.0.1:0", "127.0.0.1:70000", "dns:///localhost:1"],
)
def test_anything_else_may_be(target: str) -> None:
    assert is_beyond_loopback(target)
