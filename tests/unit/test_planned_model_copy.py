"""Memory that the planner counts for the model's copy in shared memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tasuki.config.schema import NodeConfig
from tasuki.models.folder_files import model_files_bytes
from tasuki.planner.advice import advise
from tasuki.planner.layout import GB, Layout, Part
from tasuki.planner.node_plan import node_layout
from tasuki.planner.plan import plan
from tasuki.planner.presets import MODELS
from tasuki.wire.errors import InvalidArgument


def layout(path: Path, *, preload: bool) -> Layout:
    config = NodeConfig.model_validate(
        {"state_dir": "s", "model": {"path": path, "preload": preload}, "device": "cuda"}
        | {"trainer": {"micro_batch_tokens": 2048, "num_ranks": 2}, "rollout": {"kv_ratio": 0.3, "tp_size": 2}}
    )
    return node_layout(config, MODELS["qwen2.5-7b"], gpu_bytes=141 * GB, host_bytes=500 * GB)


def test_the_copy_takes_the_bytes_of_its_files_on_the_host_in_every_stage(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(15 * GB)  # sparse
    (tmp_path / "model.bin").write_bytes(b"not read")
    copied, plain = plan(layout(tmp_path, preload=True)), plan(layout(tmp_path, preload=False))
    for now, then in zip(copied.stages, plain.stages, strict=True):
        assert now.host_bytes - then.host_bytes == now.host[Part.MODEL_COPY] == 15 * GB + 2
        assert now.gpu_bytes == then.gpu_bytes


def test_a_host_without_room_for_it_is_told_to_do_without(tmp_path: Path) -> None:
    given = layout(tmp_path, preload=False)
    peak = plan(given).host_peak.host_bytes + given.overheads.margin
    tight = replace(given, host_bytes=peak, preloaded_bytes=15 * GB)
    assert not plan(tight).fits_host
    rung = advise(plan(tight)).ladder[0]
    assert (rung.setting, rung.old, rung.new, rung.plan.fits) == ("model.preload", "true", "false", True)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 1}'])
def test_an_index_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"model\.path: .*model\.safetensors\.index\.json"):
        model_files_bytes(tmp_path)
