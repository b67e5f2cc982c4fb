"""A damaged model folder is refused before a node starts, or SGLang, trainer and export agree on its tensors."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from tasuki.node.model_folder import check_model_folder
from tasuki.rollout.sglang.scheduler import ignore_generation_config
from tasuki.trainer.durable.model_folder import SafetensorsWriter, copy_other_files
from tasuki.wire.errors import TasukiError
from tests.extent import examples
from tests.unit.memory_folder import memory_folder
from tests.unit.test_stored_tensors import copied, damage, folders, trained_from

__all__ = ["folders"]  # a fixture


@pytest.fixture(scope="module", autouse=True)
def server_args(folders: dict[str, Path]) -> None:
    """Sets the engine's arguments, which SGLang's loader reads."""
    kinds = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none"}
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(folders["single"]), device="cpu", **kinds))
    ignore_generation_config()


@settings(max_examples=examples(160), deadline=None)
@given(kind=st.sampled_from(["single", "sharded", "tied"]), seed=st.integers(0, 10**9))
def test_random_damage_is_refused_or_engine_trainer_and_export_agree(kind: str, seed: int, folders: dict[str, Path]) -> None:
    with TemporaryDirectory(dir=memory_folder()) as place:
        folder, exported = copied(folders[kind], Path(place)), Path(place) / "exported"
        damage(folder, seed)
        try:
            check_model_folder(folder)
        except TasukiError:
            return
        trained = trained_from(folder)
        source = DefaultModelLoader.Source.init_new(ModelConfig(model_path=str(folder)), None)
        served = dict(DefaultModelLoader(LoadConfig())._get_weights_iterator(source))
        for name, tensor in trained.items():
            assert torch.equal(served[name].float(), tensor), name
        exported.mkdir()
        writer = SafetensorsWriter(exported, dtype=torch.float32)
        writer.add(trained)
        writer.finish()
        copy_other_files(folder, exported, dtype=torch.float32)
        check_model_folder(exported)
        again = trained_from(exported)
        assert again.keys() == trained.keys() and all(torch.equal(again[name], tensor) for name, tensor in trained.items())
