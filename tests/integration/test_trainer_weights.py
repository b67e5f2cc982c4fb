"""The trainer service of two ranks over gRPC: published, exported, saved and loaded weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasuki.config.paths import socket_dir
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.rollout.record import published_layout
from tasuki.rollout.rollout import RankCalls
from tasuki.rollout.sync import WeightSync
from tasuki.rpc.failpoints import Action, plant
from tasuki.weights.imported_weights import import_weights
from tasuki.wire.errors import WeightsCorrupt
from tests.integration.breaking_rank import BreakingRank
from tests.integration.trainer_process import TrainerClient, TrainerProcess, samples_of_now
from tests.refusal import refused


async def test_published_weights_are_the_rounded_policy(client: TrainerClient, trainer_model: Path, tmp_path: Path) -> None:
    await client.forward_backward(await samples_of_now(client))
    version = (await client.optim_step()).version
    await client.export(tmp_path / "model")
    published = await client.publish()
    assert published.weights.policy_version == version
    assert (await client.state()).published_version == version
    imported = import_weights(published.weights, timeout_s=5)
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert published.published_bytes == sum(tensor.nbytes for tensor in exported.values())
    assert set(imported.layout()) == set(exported)
    assert imported.layout() == published_layout(NodeConfig(state_dir=tmp_path, model=ModelConfig(path=trainer_model)))
    for name, tensor in exported.items():
        assert torch.equal(imported.gathered(name), tensor), name


async def test_what_is_corrupted_after_it_was_summed_is_refused_until_it_is_published_again(
    trainer_process: TrainerProcess, client: TrainerClient
) -> None:
    sockets = socket_dir(trainer_process.state_dir)
    plant(sockets, "trainer1", "publish_weights", Action.CORRUPT)
    published = (await client.publish()).weights
    shapes = [(name, shape) for name, (shape, _) in import_weights(published, timeout_s=5).layout().items()]
    rank = BreakingRank(shapes, socket_dir=sockets)
    calls = RankCalls(1, socket_dir=sockets)
    sync = WeightSync(calls, socket_dir=sockets)
    try:
        with pytest.raises(WeightsCorrupt):
            await sync.run(published, await sync.prepare(published), timeout_s=30)
        await client.withdraw()
        published = (await client.publish()).weights
        await sync.run(published, await sync.prepare(published), timeout_s=30)
    finally:
        sync.close()
        calls.close()
        rank.close()


async def test_a_checkpoint_is_saved_though_the_log_has_no_room(
    trainer_process: TrainerProcess, client: TrainerClient, tmp_path: Path
) -> None:
    plant(socket_dir(trainer_process.state_dir), "trainer", "log.replace", Action.FULL)
    await client.save(tmp_path / "checkpoint")
    assert "event=log_not_shortened" in trainer_process.log.read_text()
    await client.load(tmp_path / "checkpoint")


async def test_an_exported_folder_loads_with_its_tokenizer(client: TrainerClient, trainer_model: Path, tmp_path: Path) -> None:
    answer = await client.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab()
        == AutoTokenizer.from_pretrained(trainer_model).get_vocab()
    )
    assert answer.bytes == sum(file.stat().st_size for file in (tmp_path / "model").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (await refused(client.export(tmp_path / "model"))).reason == "PATH_EXISTS"
    assert (await refused(client.export(Path("relative")))).metadata["field"] == "path"
    assert (await refused(client.export(Path("/proc/model")))).metadata["field"] == "path"
