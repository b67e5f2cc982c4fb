"""The node's copy of its model in shared memory: the files copied, room for it, and its removal."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.config.choices import Choices
from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.config.paths import model_copy_dir, model_source
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.models import folder_files
from tasuki.node.processes import ResourceTracker, preloaded_model, remove_model_copy, stop_node
from tasuki.rollout.arguments import engine_arguments
from tasuki.rollout.model import ModelFacts

_WEIGHTS = "model-00001-of-00001.safetensors"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeConfig]:
    """A model folder as in Hugging Face's cache, including files that no service reads."""
    model, blobs = tmp_path / "model", tmp_path / "blobs"
    for folder in (model, blobs, model / ".cache", tmp_path / "state"):
        folder.mkdir()
    (blobs / "1").write_bytes(b"weights")
    (model / _WEIGHTS).symlink_to("../blobs/1")
    (model / "consolidated.safetensors").write_bytes(b"the same once more")
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
    (model / "config.json").write_text("{}")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": _WEIGHTS}}))
    monkeypatch.setattr(folder_files, "is_on_network", lambda folder: True)
    yield NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=model))
    remove_model_copy(tmp_path / "state")


def test_copy_holds_the_files_that_services_read_and_no_links(config: NodeConfig) -> None:
    told: list[str] = []
    with preloaded_model(config, tell=told.append):
        place = model_source(config)
        assert place == model_copy_dir(config.state_dir) != config.model.path
        assert place.stat().st_mode & 0o777 == 0o700
        assert sorted(path.name for path in place.iterdir()) == ["config.json", _WEIGHTS, "model.safetensors.index.json"]
        assert not (place / _WEIGHTS).is_symlink()
        assert (place / _WEIGHTS).read_bytes() == b"weights"
    num_bytes = sum(path.stat().st_size for path in place.iterdir())
    assert f"copied {num_bytes} bytes of {config.model.path} to {place}" in told[0]


def test_the_engine_is_told_the_copy(config: NodeConfig) -> None:
    facts = ModelFacts(path="", architecture="", vocab_size=10, context_length=10, stop_token_ids=(1,), is_seeded=False)
    choices = Choices(micro_batch_tokens=1, checkpointing="none")
    with preloaded_model(config, tell=lambda _: None):
        assert engine_arguments(config, choices, facts)["model_path"] == str(model_copy_dir(config.state_dir))
    remove_model_copy(config.state_dir)
    assert engine_arguments(config, choices, facts)["model_path"] == str(config.model.path)


def test_a_model_larger_than_an_eighth_of_the_host_is_read_where_it_is(config: NodeConfig) -> None:
    with (config.model.path / _WEIGHTS).open("r+b") as file:
        file.truncate(1 << 43)  # sparse
    with preloaded_model(config, tell=pytest.fail):
        assert model_source(config) == config.model.path


def test_a_model_on_a_local_disk_is_read_where_it_is(config: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with preloaded_model(config, tell=pytest.fail):
        assert model_source(config) == config.model.path


def test_a_copy_that_fails_is_told_and_done_without(config: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, to: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told: list[str] = []
    monkeypatch.setattr("tasuki.node.processes.shutil.copyfile", fail)
    with preloaded_model(config, tell=told.append):
        assert model_source(config) == config.model.path
    assert "No space left on device" in told[0]
    assert not Path(f"{model_copy_dir(config.state_dir)}.part").exists()


def test_failure_while_copying_or_starting_leaves_nothing(config: NodeConfig) -> None:
    with pytest.raises(KeyboardInterrupt), preloaded_model(config, tell=lambda _: None):
        raise KeyboardInterrupt
    assert not model_copy_dir(config.state_dir).exists()
    assert not Path(f"{model_copy_dir(config.state_dir)}.part").exists()


def test_end_of_the_node_and_down_after_kills_remove_the_copy(config: NodeConfig) -> None:
    place, unfinished = model_copy_dir(config.state_dir), Path(f"{model_copy_dir(config.state_dir)}.part")
    with preloaded_model(config, tell=lambda _: None):
        pass
    ResourceTracker(config.state_dir).remove()
    assert not place.exists()
    StateLock.take(config.state_dir, name=NODE_LOCK).close()
    place.mkdir()
    unfinished.mkdir()
    with StateLock.take(config.state_dir, name="trainer"):
        stop_node(config.state_dir)
        assert place.exists(), "a service of somebody runs there"
    stop_node(config.state_dir)
    assert not place.exists()
    assert not unfinished.exists()
