"""The trainer service of two ranks over gRPC: learning, scoring, publishing, saving, and what it refuses."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasuki.config.failpoints import Action
from tasuki.config.places import socket_dir
from tasuki.rollout.rank_calls import RankCalls
from tasuki.rollout.sync import WeightSync
from tasuki.rpc.failpoints import plant
from tasuki.transport.imported_weights import import_weights
from tasuki.v1 import trainer_pb2, types_pb2
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import TasukiError, WeightsCorrupt, from_rpc_error
from tests.integration.breaking_rank import BreakingRank
from tests.integration.trainer_process import TrainerClient, TrainerProcess, connect, start_trainer
from tests.integration.trainer_samples import make_samples, plain_log_probs
from tests.models import VOCAB_SIZE, make_model, save_checkpoint

SETTINGS = 'compute_dtype = "float32"\nexport_stays = true\nlearning_rate = 1e-3\nmicro_batch_tokens = 128'


@pytest.fixture(scope="session")
def trainer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("qwen2_tied", seed=5), tmp_path_factory.mktemp("trainer-model") / "qwen2")


@pytest.fixture(scope="session")
def metrics_port(unused_tcp_port_factory: Callable[[], int]) -> int:
    return unused_tcp_port_factory()


@pytest.fixture(scope="session")
def trainer_process(
    trainer_model: Path, metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainerProcess]:
    settings = f"{SETTINGS}\nmetrics_port = {metrics_port}"
    trainer = start_trainer(tmp_path_factory.mktemp("trainer-node"), trainer_model, num_ranks=2, settings=settings)
    trainer.wait_until_serving()
    yield trainer
    trainer.stop()
    left = list((trainer.state_dir / "run").glob("*.sock"))
    assert left == [], trainer.log.read_text()[-4000:]


@pytest.fixture
async def client(trainer_process: TrainerProcess) -> AsyncIterator[TrainerClient]:
    """The shared service, ready to train and without gradients."""
    async with connect(trainer_process) as channel:
        client = TrainerClient(channel)
        await client.back_to_training()
        yield client
        await client.back_to_training()


async def samples_of_now(client: TrainerClient, num_samples: int = 12) -> list[TrainingSample]:
    return make_samples(num_samples, vocab_size=VOCAB_SIZE, policy_version=(await client.state()).policy_version)


async def refused(call: Any) -> TasukiError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


async def test_it_says_what_it_is(client: TrainerClient, trainer_model: Path) -> None:
    state = await client.state()
    model = AutoModelForCausalLM.from_pretrained(trainer_model)
    assert state.num_ranks == 2
    assert state.num_parameters == sum(param.numel() for param in model.parameters())
    assert (state.vocab_size, state.context_length) == (VOCAB_SIZE, 256)
    assert state.model_path == str(trainer_model)
    assert not state.HasField("published_version")


async def test_metrics_are_on_the_port_that_the_configuration_names(client: TrainerClient, metrics_port: int) -> None:
    await client.state()
    url = f"http://127.0.0.1:{metrics_port}/metrics"
    text = (await asyncio.to_thread(urllib.request.urlopen, url, timeout=5)).read().decode()
    labels = 'grpc_method="GetTrainerState",grpc_service="tasuki.v1.TrainerService",grpc_type="unary"'
    assert float(text.partition(f"grpc_server_started_total{{{labels}}} ")[2].split()[0]) >= 1


async def test_learning_lowers_the_loss_and_counts_versions(client: TrainerClient) -> None:
    version = (await client.state()).policy_version
    samples = await samples_of_now(client)
    first = await client.forward_backward(samples)
    assert (await client.state()).has_gradients
    step = await client.optim_step()
    assert step.policy_version == version + 1
    assert step.learning_rate == pytest.approx(1e-3)
    assert step.grad_norm > 0
    assert not (await client.state()).has_gradients
    second = await client.forward_backward(samples)
    assert second.loss < first.loss
    assert first.num_samples == len(samples)
    assert first.num_gap_tokens == first.num_tokens
    # The samples are of the version before the step: their gap would say nothing of rollout.
    assert (second.num_gap_tokens, second.max_log_prob_gap) == (0, 0.0)


async def test_the_answer_does_not_depend_on_how_the_stream_was_cut(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    answers = [await client.forward_backward(samples, chunk=chunk) for chunk in (1, 5, 100)]
    assert answers[0].loss == answers[1].loss == answers[2].loss


async def test_gradients_of_several_calls_add_up(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    await client.forward_backward(samples)
    once = await client.optim_step(learning_rate=0.0)
    await client.forward_backward(samples)
    await client.forward_backward(samples)
    twice = await client.optim_step(learning_rate=0.0)
    assert twice.grad_norm == pytest.approx(2 * once.grad_norm, rel=1e-5)


async def test_a_repeated_request_id_gets_the_first_answer_and_does_nothing(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    first = await client.forward_backward(samples, request_id="repeat-1")
    again = await client.forward_backward(samples, request_id="repeat-1")
    assert again == first
    step = await client.optim_step(request_id="repeat-2", learning_rate=0.0)
    assert await client.optim_step(request_id="repeat-2", learning_rate=0.0) == step
    assert (await client.state()).policy_version == step.policy_version
    await client.forward_backward(samples)
    alone = await client.optim_step(learning_rate=0.0)
    assert step.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


async def test_log_probs_equal_those_of_transformers(client: TrainerClient, trainer_model: Path, tmp_path: Path) -> None:
    samples = await samples_of_now(client, 30)
    await client.forward_backward(samples)
    await client.optim_step()
    await client.export(tmp_path / "now")
    reference = await client.log_probs(samples, trainer_pb2.POLICY_KIND_REFERENCE, temperature=0.7)
    start = plain_log_probs(trainer_model, samples, dtype=torch.float32, temperature=0.7)
    assert torch.allclose(_flat(reference), _flat(start), atol=1e-5)
    policy = await client.log_probs(samples, trainer_pb2.POLICY_KIND_POLICY)
    exported = plain_log_probs(tmp_path / "now", samples, dtype=torch.float32, temperature=1.0)
    # The export is rounded to the checkpoint's bfloat16, the policy's master weights are not.
    assert torch.allclose(_flat(policy), _flat(exported), atol=0.1)
    assert not torch.allclose(
        _flat(policy), _flat(plain_log_probs(trainer_model, samples, dtype=torch.float32, temperature=1.0))
    )


async def test_gap_is_the_distance_to_the_given_rollout_log_probs(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    scored = await client.log_probs(samples, trainer_pb2.POLICY_KIND_POLICY)
    for sample, log_probs in zip(samples, scored, strict=True):
        sample.rollout_log_probs[:] = log_probs
    answer = await client.forward_backward(samples)
    assert answer.max_log_prob_gap < 1e-5
    assert answer.clip_fraction == 0
    samples[3].rollout_log_probs[0] += 0.25
    samples[3].ClearField("loss_mask")
    assert (await client.forward_backward(samples)).max_log_prob_gap == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("prompt_token_ids", [], "samples[5].prompt_token_ids"),
        ("completion_token_ids", [3, VOCAB_SIZE], "samples[5].completion_token_ids[1]"),
        ("prompt_token_ids", [1] * 127, "samples[5]"),
        ("advantages", [float("nan")], "samples[5].advantages[0]"),
        ("rollout_log_probs", [-1.0] * 50, "samples[5].rollout_log_probs"),
        ("loss_mask", [2.0], "samples[5].loss_mask"),
    ],
)
async def test_a_bad_sample_is_named_and_nothing_is_added(
    client: TrainerClient, field: str, value: list[Any], place: str
) -> None:
    samples = await samples_of_now(client)
    good = [TrainingSample.FromString(sample.SerializeToString()) for sample in samples]
    getattr(samples[5], field)[:] = value
    error = await refused(client.forward_backward(samples))
    assert (error.reason, error.metadata["field"].startswith(place)) == ("INVALID_ARGUMENT", True), error.message
    assert not (await client.state()).has_gradients
    assert (await client.forward_backward(good)).num_samples == len(good)


async def test_bad_settings_are_refused(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    for field, value in (("clip_low", -0.1), ("clip_high", float("nan")), ("kl_coef", -1.0), ("temperature", 0.0)):
        error = await refused(client.forward_backward(samples, loss=trainer_pb2.LossConfig(**{field: value})))
        assert error.metadata["field"] == f"header.loss.{field}"
    assert (await refused(client.forward_backward([]))).metadata["field"] == "samples"
    await client.forward_backward(samples)
    assert (await refused(client.optim_step(learning_rate=-1.0))).metadata["field"] == "learning_rate"
    error = await refused(client.log_probs(samples, trainer_pb2.POLICY_KIND_UNSPECIFIED))
    assert error.metadata["field"] == "header.policy"


async def test_a_stream_starts_with_its_header(client: TrainerClient) -> None:
    async def headless() -> AsyncIterator[trainer_pb2.ForwardBackwardRequest]:
        yield trainer_pb2.ForwardBackwardRequest(samples=trainer_pb2.TrainingSamples())

    error = await refused(client.trainer.ForwardBackward(headless(), timeout=10))
    assert error.metadata["field"] == "part"


async def test_a_step_needs_gradients(client: TrainerClient) -> None:
    assert (await refused(client.optim_step())).reason == "NO_GRADIENTS"


async def test_infinite_gradients_are_discarded_without_a_step(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    before = await client.log_probs(samples, trainer_pb2.POLICY_KIND_POLICY)
    version = (await client.state()).policy_version
    broken = [TrainingSample.FromString(sample.SerializeToString()) for sample in samples]
    for sample in broken:
        sample.advantages[:] = [3e38]
        sample.ClearField("loss_mask")
    await client.forward_backward(broken)
    assert (await refused(client.optim_step())).reason == "GRADIENTS_NOT_FINITE"
    state = await client.state()
    assert (state.policy_version, state.has_gradients) == (version, False)
    assert await client.log_probs(samples, trainer_pb2.POLICY_KIND_POLICY) == before
    await client.forward_backward(samples)
    assert (await client.optim_step()).policy_version == version + 1


async def test_published_weights_are_the_rounded_policy(client: TrainerClient, tmp_path: Path) -> None:
    await client.forward_backward(await samples_of_now(client))
    version = (await client.optim_step()).policy_version
    await client.export(tmp_path / "model")
    published = await client.publish()
    assert published.weights.policy_version == version
    assert (await client.state()).published_version == version
    imported = import_weights(published.weights, timeout_s=5)
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert published.published_bytes == sum(tensor.nbytes for tensor in exported.values())
    assert set(imported.layout()) == set(exported)
    for name, tensor in exported.items():
        assert torch.equal(imported.gathered(name), tensor), name


async def test_what_is_corrupted_after_it_was_summed_is_refused_until_it_is_published_again(
    trainer_process: TrainerProcess, client: TrainerClient
) -> None:
    sockets = socket_dir(trainer_process.state_dir)
    plant(sockets, "trainer1", "publish_weights", Action.CORRUPT)
    published = (await client.publish()).weights
    shapes = [(name, shape) for name, (shape, _) in import_weights(published, timeout_s=5).layout().items()]
    rank = BreakingRank(shapes)
    calls = RankCalls(rank, socket_dir=sockets)
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


async def test_the_ring_of_stages_is_kept(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    await client.forward_backward(samples)
    assert (await refused(client.publish())).reason == "GRADIENTS_PENDING"
    assert (await refused(client.pause())).reason == "GRADIENTS_PENDING"
    await client.discard_gradients()
    await client.publish()
    assert (await refused(client.publish())).reason == "STAGE_ORDER"
    for call in (
        client.forward_backward(samples),
        client.optim_step(),
        client.log_probs(samples, trainer_pb2.POLICY_KIND_POLICY),
        client.save(Path("/nonexistent/checkpoint")),
    ):
        assert (await refused(call)).reason == "WRONG_PHASE"
    error = await refused(client.pause(tags=[types_pb2.MEMORY_TAG_KV_CACHE]))
    assert error.metadata["field"] == "tags[0]"
    paused = await client.pause()
    assert list((await client.state()).resident_tags) == []
    usages = [usage for usage in (await client.usage()).tags if usage.tag != types_pb2.MEMORY_TAG_EXPORT]
    assert all(usage.is_paused and usage.mapped_bytes == 0 for usage in usages)
    assert paused.released_bytes == sum(usage.total_bytes for usage in usages) > 0
    assert (await refused(client.withdraw())).reason == "STAGE_ORDER"
    assert (await client.resume()).mapped_bytes == paused.released_bytes
    state = await client.state()
    assert (len(state.resident_tags), state.stage, state.HasField("published_version")) == (
        3,
        types_pb2.STAGE_LOAD_TRAINER,
        False,
    )
    await client.withdraw()
    await client.forward_backward(samples)


async def test_an_old_epoch_is_refused(client: TrainerClient) -> None:
    await client.publish()
    stale = types_pb2.CommandId(epoch=0, sequence=10**6, request_id="stale-epoch")
    error = await refused(client.trainer.PublishWeights(trainer_pb2.PublishWeightsRequest(command=stale), timeout=10))
    assert error.reason == "STALE_EPOCH"


async def test_usage_is_measured_per_rank(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    await client.forward_backward(samples)
    await client.optim_step()
    await client.forward_backward(samples)
    state, usage = await client.state(), await client.usage()
    total = {tag: sum(each.total_bytes for each in usage.tags if each.tag == tag) for tag in {each.tag for each in usage.tags}}
    # Memory comes in chunks, and tensors below 2 KiB stay out of them.
    assert total[types_pb2.MEMORY_TAG_GRADIENTS] >= 3.5 * state.num_parameters
    assert total[types_pb2.MEMORY_TAG_OPTIMIZER] >= 7 * state.num_parameters
    assert total[types_pb2.MEMORY_TAG_WEIGHTS] >= 3.5 * state.num_parameters
    assert [(each.rank, each.device) for each in usage.devices] == [(0, "cpu"), (1, "cpu")]
    assert {each.rank for each in usage.tags} == {0, 1}


async def test_an_exported_folder_loads_with_its_tokenizer(client: TrainerClient, trainer_model: Path, tmp_path: Path) -> None:
    answer = await client.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab()
        == AutoTokenizer.from_pretrained(trainer_model).get_vocab()
    )
    assert (answer.bytes, ["model"]) == (_folder_bytes(tmp_path / "model"), _names(tmp_path))
    assert (await refused(client.export(tmp_path / "model"))).reason == "PATH_EXISTS"
    assert (await refused(client.export(Path("relative")))).metadata["field"] == "path"
    assert (await refused(client.export(Path("/proc/model")))).metadata["field"] == "path"


async def test_a_checkpoint_brings_back_model_and_optimizer(client: TrainerClient, tmp_path: Path) -> None:
    samples = await samples_of_now(client)
    await client.forward_backward(samples)
    await client.optim_step()
    saved = await client.save(tmp_path / "checkpoint")
    before = await client.log_probs(samples, trainer_pb2.POLICY_KIND_POLICY)
    assert (await client.load(tmp_path / "checkpoint")).policy_version == saved.policy_version
    assert await client.log_probs(samples, trainer_pb2.POLICY_KIND_POLICY) == before
    assert (await refused(client.save(tmp_path / "checkpoint"))).reason == "PATH_EXISTS"
    assert (await refused(client.load(tmp_path / "nothing"))).reason == "PATH_NOT_FOUND"
    await client.forward_backward(samples)
    await client.optim_step()
    after = await client.log_probs(samples, trainer_pb2.POLICY_KIND_POLICY)
    error = await refused(client.load(tmp_path / "checkpoint"))
    assert (error.reason, error.metadata["want"]) == ("VERSION_ORDER", str(saved.policy_version))
    assert await client.log_probs(samples, trainer_pb2.POLICY_KIND_POLICY) == after


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row])
