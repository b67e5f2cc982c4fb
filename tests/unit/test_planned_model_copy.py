"""Memory that the planner counts for the model's copy in shared memory."""

from pathlib import Path

import pytest

from tasuki.config.schema import NodeConfig
from tasuki.models import folder_files
from tasuki.models.folder_files import is_on_network, model_files_bytes
from tasuki.planner.node import GB, Node, Part
from tasuki.planner.plan import plan
from tasuki.planner.presets import MODELS
from tasuki.wire.errors import InvalidArgument
from tests.planned import chosen_node


def layout(path: Path) -> Node:
    config = NodeConfig.model_validate(
        {"state_dir": "s", "model": {"path": path}, "device": "cuda"}
        | {"trainer": {"micro_batch_tokens": 2048, "num_ranks": 2}, "rollout": {"kv_ratio": 0.3, "tp_size": 2}}
    )
    return chosen_node(config, MODELS["qwen2.5-7b"], host_bytes=500 * GB)


def test_the_copy_takes_the_bytes_of_its_files_on_the_host_in_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(15 * GB)  # sparse
    (tmp_path / "model.bin").write_bytes(b"not read")
    plain = plan(layout(tmp_path))
    monkeypatch.setattr(folder_files, "is_on_network", lambda folder: True)
    copied = plan(layout(tmp_path))
    for now, then in zip(copied.stages, plain.stages, strict=True):
        assert now.host_bytes - then.host_bytes == now.host[Part.MODEL_COPY] == 15 * GB + 2
        assert now.gpu_bytes == then.gpu_bytes


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
