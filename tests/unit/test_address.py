"""Where a node's sockets are, as both ends work it out."""

from pathlib import Path

import pytest

from tasuki.wire.address import socket_folder, unix_target

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
