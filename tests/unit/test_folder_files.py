"""Files of a model folder: on a network or not, and their sizes."""

from pathlib import Path

import pytest

from tasuki.models.folder_files import is_on_network, model_files_bytes
from tasuki.wire.errors import InvalidArgument


@pytest.mark.parametrize(
    ("kind", "is_one"), [("nfs4", True), ("fuse.s3fs", True), ("fuse.fuse-overlayfs", False), ("ext4", False)]
)
def test_a_network_file_system_is_told_by_its_nearest_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_one: bool
) -> None:
    mounts = tmp_path / "mountinfo"
    lines = ["1 0 8:1 / / rw - ext4 /dev/sda rw", f"2 1 0:9 / {tmp_path}/a\\040b rw shared:1 - {kind} server:/ rw"]
    mounts.write_text("\n".join(lines))
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read(mounts if path == Path("/proc/self/mountinfo") else path))
    assert is_on_network(tmp_path / "a b" / "model") is is_one
    assert not is_on_network(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 1}'])
def test_an_index_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"model\.path: .*model\.safetensors\.index\.json"):
        model_files_bytes(tmp_path)
