"""The client against real servers: verbs, phases, chunks, repeats and errors."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tasuki.client import AsyncClient, Client, LossConfig, Phase, PpoLoss, SamplingParams, Stage, StageStatus, TrainingSample
from tasuki.client.types import FinishReason
from tasuki.v1 import types_pb2
from tasuki.wire.channel import MAX_CHUNK_BYTES
from tasuki.wire.errors import Asleep, ChangeoverRunning, DeadlineExceeded, InvalidArgument, NoGradients, PeerUnavailable
from tests.integration.scripted_node import ScriptedNode, scripted_node
from tests.limits import limit_s
from tests.refusal import refusing

SAMPLE = TrainingSample([1, 2], [3, 4], rollout_log_probs=[-0.5, -0.25], advantages=1.0, policy_version=7)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[ScriptedNode]:
    async with scripted_node(tmp_path) as node:
        yield node


@pytest.fixture
async def client(node: ScriptedNode, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(state_dir=tmp_path, timeout_s=20) as client:
        yield client


async def test_generate_acquires_rollout_and_returns_samples_in_prompt_order(node: ScriptedNode, client: AsyncClient):
    params = SamplingParams(max_new_tokens=2, temperature=0.0, stop_token_ids=[9])
    samples = await client.generate([[10], np.array([11, 12], dtype=np.int32)], params, num_samples=2)
    assert [(sample.prompt_index, sample.sample_index) for sample in samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [sample.token_ids.tolist() for sample in samples] == [[10, 0], [10, 1], [11, 0], [11, 1]]
    assert samples[0].rollout_log_probs.dtype == np.float32
    assert (samples[0].finish_reason, samples[0].policy_version) == (FinishReason.STOP, 3)
    assert node.phase == types_pb2.PHASE_ROLLOUT
    sent = node.requests[0].sampling_params
    assert (sent.max_new_tokens, sent.temperature, list(sent.stop_token_ids)) == (2, 0.0, [9])
    assert sent.HasField("temperature")
    assert not sent.HasField("top_p")


async def test_a_generation_that_is_sent_again_keeps_its_ids_and_every_other_has_its_own(
    node: ScriptedNode, client: AsyncClient
):
    prompts = [np.full(100_000, index + 1, dtype=np.int32) for index in range(25)]
    node.failures.append(PeerUnavailable("connection reset"))
    await client.generate(prompts)
    await client.generate(prompts)
    ids: dict[int, list[str]] = {}
    for request in node.requests:
        ids.setdefault(request.first_prompt, []).append(request.request_id)
    assert sorted(ids) == [0, 10, 20]
    for tried in ids.values():
        # At most the lost try, its repetition and the next generation; a try may end before all of its requests are sent.
        *lost, repeat, other = tried
        assert other != repeat
        assert set(lost) <= {repeat}
    assert len(node.requests) > 6


async def test_leaving_a_stream_early_cancels_the_call_at_rollout(node: ScriptedNode, client: AsyncClient):
    stream = client.generate_stream([[1], [2], [3]])
    node.hang.clear()
    first = await anext(stream)
    assert first.prompt_index == 2
    await stream.aclose()
    await asyncio.wait_for(node.left_early.wait(), timeout=60)


async def test_a_client_whose_phase_was_taken_acquires_it_again(node: ScriptedNode, client: AsyncClient):
    await client.generate([[1]])
    node.phase = types_pb2.PHASE_TRAIN  # another client
    assert len(await client.generate([[1]])) == 1
    await client.forward_backward([SAMPLE])
    node.phase = types_pb2.PHASE_ROLLOUT
    assert (await client.optim_step()).version == 1


async def test_samples_that_are_out_are_never_generated_twice(node: ScriptedNode, client: AsyncClient):
    node.failures.append(Asleep("taken away in the middle"))
    with pytest.raises(Asleep, match="in the middle"):
        await client.generate([[1], [2]])
    assert len(node.requests) == 1


async def test_training_samples_arrive_whole_in_chunks_of_at_most_a_mebibyte(node: ScriptedNode, client: AsyncClient):
    generator = np.random.default_rng(0)
    samples = [
        TrainingSample(
            prompt_token_ids=generator.integers(0, 150_000, 2000).astype(np.int32),
            completion_token_ids=generator.integers(0, 150_000, 3000).astype(np.int32),
            rollout_log_probs=-generator.random(3000).astype(np.float32),
            advantages=generator.random(3000).astype(np.float32) if index % 2 else 0.5,
            loss_mask=np.ones(3000, dtype=np.float32),
            policy_version=index,
        )
        for index in range(60)
    ]
    done = await client.forward_backward(samples, LossConfig(loss=PpoLoss(clip_high=0.28)))
    assert done.num_samples == 60
    assert done.loss == pytest.approx(0.28)
    with pytest.raises(KeyError):  # it was 0
        done.metrics["log_prob_gap"]
    assert len(node.chunk_bytes) > 3
    assert max(node.chunk_bytes) <= MAX_CHUNK_BYTES + 100
    for sent, arrived in zip(samples, node.samples, strict=True):
        np.testing.assert_array_equal(arrived.prompt_token_ids, sent.prompt_token_ids)
        np.testing.assert_array_equal(arrived.completion_token_ids, sent.completion_token_ids)
        np.testing.assert_array_equal(np.float32(arrived.rollout_log_probs), sent.rollout_log_probs)
        np.testing.assert_array_equal(np.float32(arrived.advantages), np.atleast_1d(np.float32(sent.advantages)))
        assert arrived.policy_version == sent.policy_version


async def test_a_refused_setting_of_the_loss_has_the_name_that_the_client_gives_it(node: ScriptedNode, client: AsyncClient):
    node.refusals.append(InvalidArgument("header.loss.settings.denominator", "is missing"))
    with refusing("loss.denominator", match=r"^loss\.denominator: is missing"):
        await client.forward_backward([SAMPLE])


@pytest.mark.parametrize("lost", [PeerUnavailable("connection reset"), DeadlineExceeded("too late")])
async def test_a_lost_answer_is_asked_for_again_and_the_work_is_done_once(node: ScriptedNode, client: AsyncClient, lost):
    node.failures += [lost, lost]
    assert (await client.forward_backward([SAMPLE])).num_samples == 1
    assert node.num_forward_backward == 1
    node.failures += [lost]
    assert (await client.optim_step(learning_rate=0.5)).version == 1
    assert node.policy_version == 1


async def test_a_service_that_stays_away_is_an_error_in_the_end(node: ScriptedNode, tmp_path: Path):
    node.failures += [PeerUnavailable("connection reset")] * 100
    async with AsyncClient(state_dir=tmp_path, recovery_timeout_s=0.5) as impatient:
        with pytest.raises(PeerUnavailable, match="connection reset"):
            await impatient.forward_backward([SAMPLE])
    assert node.num_forward_backward == 1


async def test_an_old_epoch_is_read_again(node: ScriptedNode, client: AsyncClient):
    await client.forward_backward([SAMPLE])
    node.epoch = node.gate.epoch = 5  # a restarted coordinator
    assert (await client.optim_step()).version == 1


async def test_a_refusal_is_raised_and_not_repeated(node: ScriptedNode, client: AsyncClient):
    with pytest.raises(NoGradients) as raised:
        await client.optim_step()
    assert raised.value.reason == "NO_GRADIENTS"
    node.refusals.append(InvalidArgument("samples[0].advantages", "nan is not finite"))
    with refusing("samples[0].advantages"):
        await client.forward_backward([SAMPLE])
    assert node.num_forward_backward == 0


async def test_a_service_that_hangs_ends_at_the_deadline(node: ScriptedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasuki.client.connection.READ_TIMEOUT_S", 0.3)
    node.hang.clear()
    async with AsyncClient(state_dir=tmp_path, timeout_s=0.5) as client:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.forward_backward([SAMPLE])
        assert time.monotonic() - started < limit_s(5)
        with pytest.raises(DeadlineExceeded):
            await client.generate([[1], [2]])


async def test_log_probs_come_in_the_order_of_the_samples(node: ScriptedNode, client: AsyncClient):
    samples = [TrainingSample([1], np.full(50_000, index, dtype=np.int32)) for index in range(20)]
    log_probs = await client.compute_log_probs(samples)
    assert [one[0] for one in log_probs] == [-float(index) for index in range(20)]
    assert log_probs[0].dtype == np.float32


async def test_changeovers_are_read_in_pages(node: ScriptedNode, client: AsyncClient) -> None:
    assert [one.changeover_id for one in await client.changeovers(limit=220)] == [f"c{number}" for number in range(250, 30, -1)]


async def test_watch_gives_the_state_and_then_what_changes(node: ScriptedNode, client: AsyncClient):
    stream = client.watch()
    first = await anext(stream)
    assert (Phase.of(first.state.phase), first.HasField("event")) == (Phase.TRAIN, False)
    change = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.1)
    await client.acquire(Phase.ROLLOUT)
    second = await change
    assert (Phase.of(second.state.phase), Stage.of(second.event.stage)) == (Phase.ROLLOUT, Stage.RESUME_KV)
    await stream.aclose()


async def test_the_client_without_asyncio_does_the_same(node: ScriptedNode, tmp_path: Path):
    def drive() -> None:
        with Client(state_dir=tmp_path) as client:
            assert [sample.token_ids.tolist() for sample in client.generate([[5], [6]])] == [[5, 0], [6, 0]]
            assert {sample.prompt_index for sample in client.generate_stream([[5], [6]])} == {0, 1}
            assert client.forward_backward([SAMPLE]).num_samples == 1
            assert client.optim_step().version == 1
            watched = client.watch()
            assert Phase.of(next(watched).state.phase) is Phase.TRAIN
            watched.close()
            with pytest.raises(InvalidArgument):
                client.forward_backward([])
        client.close()

    await asyncio.to_thread(drive)


# --- a changeover that a client begins returns at once; the next verb that needs a phase waits for it


async def test_it_runs_behind_the_caller_until_a_verb_needs_a_phase(node: ScriptedNode, client: AsyncClient) -> None:
    await client.generate([[1]])
    node.changeover.clear()
    await client.begin_acquire(Phase.TRAIN)
    learning = asyncio.create_task(client.forward_backward([SAMPLE]))
    await asyncio.sleep(0.2)
    assert (node.num_forward_backward, node.phase, learning.done()) == (0, types_pb2.PHASE_ROLLOUT, False)
    node.changeover.set()
    assert (await learning).num_samples == 1
    assert node.num_changeovers == 2


async def test_its_stages_are_those_of_the_acquire_that_follows(node: ScriptedNode, client: AsyncClient) -> None:
    await client.begin_acquire(Phase.ROLLOUT)
    (event,) = await client.acquire(Phase.ROLLOUT)
    assert (StageStatus.of(event.status), event.bytes) == (StageStatus.DONE, 7)
    (held,) = await client.acquire(Phase.ROLLOUT)
    assert StageStatus.of(held.status) is StageStatus.HELD


async def test_a_verb_of_another_phase_comes_after_it(node: ScriptedNode, client: AsyncClient) -> None:
    await client.begin_acquire(Phase.ROLLOUT)
    await client.begin_acquire(Phase.TRAIN)
    await client.generate([[1]])
    assert (node.phase, node.num_changeovers) == (types_pb2.PHASE_ROLLOUT, 3)


async def test_what_it_ended_in_is_raised_by_the_verb_once(node: ScriptedNode, client: AsyncClient) -> None:
    node.refusals.append(ChangeoverRunning("phase TRAIN is under way", changeover_id="c9"))
    await client.begin_acquire(Phase.ROLLOUT)
    with pytest.raises(ChangeoverRunning):
        await client.generate([[1]])
    assert len(await client.generate([[1]])) == 1


async def test_a_client_that_is_closed_leaves_it_to_the_node(node: ScriptedNode, tmp_path: Path) -> None:
    def drive() -> None:
        with Client(state_dir=tmp_path) as client:
            client.generate([[1]])
            node.changeover.clear()
            client.begin_acquire(Phase.TRAIN)

    await asyncio.wait_for(asyncio.to_thread(drive), timeout=60)
    node.changeover.set()
