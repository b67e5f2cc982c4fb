"""The node's copy of its model in shared memory: the files copied, room for it, and its removal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.config.paths import model_copy_dir, model_source
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.node.model_copy import preloaded_model, remove_model_copy
from tasuki.node.processes import ResourceTracker
from tasuki.node.stop import stop_node
from tasuki.rollout.arguments import engine_arguments
from tasuki.rollout.model import ModelFacts
from tasuki.wire.errors import InvalidArgument

_WEIGHTS = "model-00001-of-00001.safetensors"


@pytest.fixture
def config(tmp_path: Path) -> Iterator[NodeConfig]:
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
    yield NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=model, preload=True))
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
    assert f"copied {num_bytes} bytes to {place}" in told[0]


def test_the_engine_is_told_the_copy(config: NodeConfig) -> None:
    facts = ModelFacts(path="", architecture="", vocab_size=10, context_length=10, stop_token_ids=(1,), is_seeded=False)
    with preloaded_model(config, tell=lambda _: None):
        assert engine_arguments(config, facts)["model_path"] == str(model_copy_dir(config.state_dir))
    remove_model_copy(config.state_dir)
    assert engine_arguments(config, facts)["model_path"] == str(config.model.path)


def test_lack_of_room_is_refused_with_the_bytes_and_leaves_nothing(config: NodeConfig) -> None:
    with (config.model.path / _WEIGHTS).open("r+b") as file:
        file.truncate(1 << 43)  # sparse
    with (
        pytest.raises(InvalidArgument, match=r"model\.preload: the model's files take") as refused,
        preloaded_model(config, tell=print),
    ):
        pass
    metadata = refused.value.metadata
    assert metadata["field"] == "model.preload"
    assert int(metadata["needed_bytes"]) > 1 << 43 > int(metadata["free_bytes"]) > 0
    assert not model_copy_dir(config.state_dir).exists()


def test_failure_while_copying_or_starting_leaves_nothing(config: NodeConfig) -> None:
    with pytest.raises(KeyboardInterrupt), preloaded_model(config, tell=lambda _: None):
        raise KeyboardInterrupt
    assert not model_copy_dir(config.state_dir).exists()
    (config.model.path / "tokenizer.json").write_text("{}")
    (config.model.path / "tokenizer.json").chmod(0)
    try:
        (config.model.path / "tokenizer.json").read_bytes()
    except PermissionError:
        with pytest.raises(InvalidArgument, match=r"model\.preload: .* cannot be copied"), preloaded_model(config, tell=print):
            pass
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
