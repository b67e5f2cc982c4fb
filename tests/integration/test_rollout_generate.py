"""Samples of the rollout service through real gRPC, on a real engine: log-probs, refusals, and ends of calls."""

import asyncio
import json

import pytest
import torch
from grpc_health.v1 import health_pb2

from tasuki.v1 import rollout_pb2, types_pb2
from tasuki.wire.errors import Draining, InvalidArgument
from tests.integration.conftest import TOKENIZER_EOS
from tests.integration.rollout_process import (
    RolloutClient,
    RolloutProcess,
    TestTrainer,
    generate_request,
    log_probs_of,
    long_call,
    start_samples,
    stopped_engine,
    until_idle,
)
from tests.models import EOS, VOCAB_SIZE, char_tokenizer
from tests.refusal import refused

CONTEXT_LENGTH = 256


WEIGHTS, KV = types_pb2.MEMORY_TAG_WEIGHTS, types_pb2.MEMORY_TAG_KV_CACHE


async def test_samples_come_with_their_version_and_log_probs(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(5))
    prompts = [[5, 6, 7], [8, 9]]
    samples = await rollout.generate(prompts, num_samples=3, max_new_tokens=6, temperature=0.7, ignore_eos=True)
    assert sorted((s.prompt_index, s.sample_index) for s in samples) == [(p, i) for p in range(2) for i in range(3)]
    assert {(s.policy_version, s.finish_reason, len(s.token_ids)) for s in samples} == {(5, types_pb2.FINISH_REASON_LENGTH, 6)}
    for sample in samples:
        theirs = log_probs_of(trainer.model, prompts[sample.prompt_index], list(sample.token_ids), temperature=0.7)
        # The engine computes in bfloat16, the reference in float32.
        assert torch.allclose(torch.tensor(sample.rollout_log_probs), theirs, atol=0.1)


async def test_a_later_version_is_what_generates_even_with_a_known_prompt(rollout: RolloutClient, trainer: TestTrainer) -> None:
    """A prefix cached under the first version would give log-probs of neither version."""
    prompt = list(range(3, 60))
    await rollout.wake(trainer.publish(5))
    await rollout.generate([prompt], max_new_tokens=4, ignore_eos=True)
    await rollout.sleep()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1).add_(0.01)
    await rollout.wake(trainer.publish(6))
    (sample,) = await rollout.generate([prompt], max_new_tokens=4, ignore_eos=True)
    assert sample.policy_version == 6
    theirs = log_probs_of(trainer.model, prompt, list(sample.token_ids))
    assert torch.allclose(torch.tensor(sample.rollout_log_probs), theirs, atol=0.15)


async def test_a_seed_repeats_samples_however_prompts_are_split_and_none_is_drawn_twice(
    rollout: RolloutClient, trainer: TestTrainer
) -> None:
    await rollout.wake(trainer.publish(6))

    async def tokens(num_prompts: int, *, seed: int, first_prompt: int = 0) -> dict[tuple[int, int], list[int]]:
        samples = await rollout.generate(
            [[5, 6]] * num_prompts,
            num_samples=4,
            first_prompt=first_prompt,
            max_new_tokens=12,
            ignore_eos=True,
            sampling_seed=seed,
        )
        return {(first_prompt + sample.prompt_index, sample.sample_index): list(sample.token_ids) for sample in samples}

    whole = await tokens(3, seed=100)
    assert await tokens(1, seed=100) | await tokens(2, seed=100, first_prompt=1) == whole
    drawn = [*whole.values(), *(await tokens(1, seed=101)).values()]
    assert len({tuple(sample) for sample in drawn}) == 16


async def test_samples_say_under_which_distribution_their_log_probs_are(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(6))

    async def facts(**sampling: object) -> tuple[float, bool]:
        (sample,) = await rollout.generate([[5, 6]], max_new_tokens=4, **sampling)
        return round(sample.temperature, 3), sample.has_exact_log_probs

    assert await facts() == (1.0, True)
    assert await facts(temperature=0.7, top_p=1.0, top_k=-1, min_new_tokens=0, repetition_penalty=1.0) == (0.7, True)
    assert await facts(temperature=0.0) == (1.0, False)
    assert await facts(temperature=0.7, top_k=1) == (1.0, False)
    for shaping in (
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_new_tokens": 1},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {7: 2.0}},
        {"json_schema": '{"type": "boolean"}'},
    ):
        assert await facts(temperature=0.7, **shaping) == (0.7, False), shaping


async def test_the_tokenizers_end_of_sequence_ends_a_sample_and_is_reported(rollout: RolloutClient, trainer: TestTrainer):
    tokenizer_eos = char_tokenizer().convert_tokens_to_ids(TOKENIZER_EOS)
    assert isinstance(tokenizer_eos, int)
    ends = {EOS, tokenizer_eos}
    await rollout.wake(trainer.publish(6))
    assert set((await rollout.state()).stop_token_ids) == ends
    samples = await rollout.generate([[5, 6]], num_samples=128, max_new_tokens=60, temperature=3.0)
    stopped = [sample for sample in samples if sample.finish_reason == types_pb2.FINISH_REASON_STOP]
    assert {sample.token_ids[-1] for sample in stopped} == ends
    assert not any(ends & set(sample.token_ids[:-1]) for sample in samples)
    free = await rollout.generate([[5, 6]], num_samples=128, max_new_tokens=60, temperature=3.0, ignore_eos=True)
    assert {len(sample.token_ids) for sample in free} == {60}


async def test_stop_tokens_end_a_sample_and_are_its_last_token(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(6))
    (free,) = await rollout.generate([[5, 6]], max_new_tokens=8, temperature=0.0, ignore_eos=True)
    stop = free.token_ids[3]
    first = list(free.token_ids).index(stop)
    (stopped,) = await rollout.generate([[5, 6]], max_new_tokens=8, temperature=0.0, stop_token_ids=[stop])
    assert (list(stopped.token_ids), stopped.finish_reason) == (list(free.token_ids[: first + 1]), types_pb2.FINISH_REASON_STOP)
    assert len(stopped.rollout_log_probs) == first + 1
    (last,) = await rollout.generate([[5, 6]], max_new_tokens=first + 1, temperature=0.0, stop_token_ids=[stop])
    assert (list(last.token_ids), last.finish_reason) == (list(stopped.token_ids), types_pb2.FINISH_REASON_STOP)


async def test_stop_texts_end_a_sample_that_spells_them_token_by_token(rollout: RolloutClient, trainer: TestTrainer) -> None:
    """Every character is a token. The tokens and log-probs up to the last of the text are those drawn without it."""
    await rollout.wake(trainer.publish(6))
    common = {"num_samples": 4, "max_new_tokens": 40, "temperature": 0.9, "ignore_eos": True, "sampling_seed": 11}
    free = {sample.sample_index: sample for sample in await rollout.generate([[5, 6]], **common)}
    tokenizer = char_tokenizer()
    text = tokenizer.decode(free[0].token_ids[20:26])
    assert len(text) == 6
    ended = {sample.sample_index: sample for sample in await rollout.generate([[5, 6]], **common, stop=["never so", text])}
    assert (ended[0].finish_reason, len(ended[0].token_ids)) == (types_pb2.FINISH_REASON_STOP, 26)
    assert ended[0].token_ids == free[0].token_ids[:26]
    assert ended[0].rollout_log_probs == pytest.approx(free[0].rollout_log_probs[:26], abs=1e-5)
    assert ended[0].has_exact_log_probs
    assert all(ended[index].token_ids == free[index].token_ids for index in (1, 2, 3))
    last = {one.sample_index: one for one in await rollout.generate([[5, 6]], **common | {"max_new_tokens": 26}, stop=[text])}
    assert (last[0].finish_reason, last[0].token_ids) == (types_pb2.FINISH_REASON_STOP, ended[0].token_ids)
    assert last[1].finish_reason == types_pb2.FINISH_REASON_LENGTH


async def test_biases_and_schemas_decide_what_is_drawn(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(6))
    (forced,) = await rollout.generate([[5, 6]], max_new_tokens=4, ignore_eos=True, logit_bias={7: 100.0})
    assert list(forced.token_ids) == [7] * 4
    schema = (
        '{"type": "object", "properties": {"sum": {"enum": [12, 345]}}, "required": ["sum"], "additionalProperties": false}'
    )
    blanks = dict.fromkeys(char_tokenizer().convert_tokens_to_ids(list(" \n\t\r\x0b\x0c")), -100.0)
    samples = await rollout.generate([[5, 6]], num_samples=6, max_new_tokens=100, json_schema=schema, logit_bias=blanks)
    texts = [char_tokenizer().decode(sample.token_ids, skip_special_tokens=True) for sample in samples]
    assert {json.loads(text.rstrip(TOKENIZER_EOS))["sum"] for text in texts} <= {12, 345}
    assert {sample.finish_reason for sample in samples} == {types_pb2.FINISH_REASON_STOP}


async def test_prompt_and_completion_may_fill_the_context_to_the_last_token(rollout: RolloutClient, trainer: TestTrainer):
    await rollout.wake(trainer.publish(6))
    for length in (CONTEXT_LENGTH - 1, CONTEXT_LENGTH - 5):
        (sample,) = await rollout.generate([[5] * length], max_new_tokens=CONTEXT_LENGTH - length, ignore_eos=True)
        assert len(sample.token_ids) == CONTEXT_LENGTH - length
    (unasked,) = await rollout.generate([[5] * (CONTEXT_LENGTH - 3)], ignore_eos=True)
    assert len(unasked.token_ids) == 3


@pytest.mark.parametrize(
    ("prompts", "arguments", "field"),
    [
        ([], {}, "prompts"),
        ([[]], {}, "prompts[0].token_ids"),
        ([[5], [5, -1]], {}, "prompts[1].token_ids[1]"),
        ([[VOCAB_SIZE]], {}, "prompts[0].token_ids[0]"),
        ([[5]], {"num_samples": 0}, "num_samples"),
        ([[5]] * 2, {"num_samples": 40_000}, "num_samples"),
        ([[5] * CONTEXT_LENGTH], {}, "prompts[0].token_ids"),
        ([[5] * 200], {"max_new_tokens": 57}, "sampling_params.max_new_tokens"),
        ([[5]], {"temperature": -0.1}, "sampling_params.temperature"),
        ([[5]], {"frequency_penalty": 3.0}, "sampling_params.frequency_penalty"),
        ([[5]], {"min_new_tokens": 9, "max_new_tokens": 8}, "sampling_params.min_new_tokens"),
        ([[5]], {"stop_token_ids": [1, VOCAB_SIZE]}, "sampling_params.stop_token_ids[1]"),
        ([[5]], {"session_key": "s" * 129}, "session_key"),
        ([[5]], {"stop": ["a", ""]}, "sampling_params.stop[1]"),
        ([[5]], {"stop": ["a"] * 17}, "sampling_params.stop"),
        ([[5]], {"logit_bias": {VOCAB_SIZE: 1.0}}, "sampling_params.logit_bias"),
        ([[5]], {"json_schema": '{"type": "strin"}'}, "sampling_params.json_schema"),
        ([[5]], {"json_schema": "{}", "min_new_tokens": 2}, "sampling_params.json_schema"),
    ],
)
async def test_bad_requests_name_the_field(
    rollout: RolloutClient, prompts: list[list[int]], arguments: dict[str, object], field: str
) -> None:
    error = await refused(rollout.generate(prompts, **arguments))
    assert isinstance(error, InvalidArgument)
    assert error.metadata["field"] == field


async def test_cancelling_a_call_takes_its_requests_out_of_the_engine(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(6))
    call = rollout.rollout.Generate(generate_request([[5, 6]], num_samples=24, max_new_tokens=250, ignore_eos=True), timeout=60)
    while (await rollout.state()).num_running < 24:
        await asyncio.sleep(0.01)
    call.cancel()
    assert await until_idle(rollout) == 0
    assert len(await rollout.generate([[5]], max_new_tokens=2, ignore_eos=True)) == 1


async def test_drain_cuts_and_returns_what_there_is(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(6))
    async with long_call(rollout, num_samples=24) as running:
        await asyncio.sleep(0.1)  # for a few tokens, of 24 times 250
        drained = await rollout.drain(grace_ms=0)
        samples = await running
    assert (drained.num_finished, drained.num_cut) == (0, 24)
    assert {sample.finish_reason for sample in samples} == {types_pb2.FINISH_REASON_CUT}
    assert all(len(sample.token_ids) == len(sample.rollout_log_probs) for sample in samples)
    assert any(sample.token_ids for sample in samples)
    for sample in samples:
        theirs = log_probs_of(trainer.model, [5, 6], list(sample.token_ids)) if sample.token_ids else torch.empty(0)
        assert torch.allclose(torch.tensor(sample.rollout_log_probs), theirs, atol=0.15)


async def test_drain_cuts_a_call_that_asks_for_it_and_lets_others_finish(
    rollout: RolloutClient, rollout_process: RolloutProcess, trainer: TestTrainer
) -> None:
    await rollout.wake(trainer.publish(6))
    request = generate_request([[5, 6]], num_samples=2, max_new_tokens=250, ignore_eos=True)
    request.cut_on_drain = True
    other = generate_request([[7]], max_new_tokens=240, ignore_eos=True)

    async def read(asked: rollout_pb2.GenerateRequest) -> list[types_pb2.Sample]:
        return [sample async for answer in rollout.rollout.Generate(asked, timeout=60) for sample in answer.samples]

    with stopped_engine(rollout_process):
        reading = [asyncio.ensure_future(read(one)) for one in (request, other)]
        while (await rollout.state()).num_running < 3:
            await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(rollout.drain(grace_ms=50_000))
        while await rollout_process.generate_health() != health_pb2.HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.01)
    cut, whole = await asyncio.gather(*reading)
    drained = await draining
    assert (drained.num_finished, drained.num_cut) == (1, 2)
    assert {sample.finish_reason for sample in cut} == {types_pb2.FINISH_REASON_CUT}
    assert [len(sample.token_ids) for sample in whole] == [240]


async def test_drain_lets_short_samples_finish_and_takes_no_new_ones(
    rollout: RolloutClient, rollout_process: RolloutProcess, trainer: TestTrainer
) -> None:
    await rollout.wake(trainer.publish(6))
    with stopped_engine(rollout_process):
        running = await start_samples(rollout, num_samples=2)
        draining = asyncio.ensure_future(rollout.drain(grace_ms=50_000))
        while await rollout_process.generate_health() != health_pb2.HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.01)
        assert isinstance(await refused(rollout.generate([[5]], max_new_tokens=1)), Draining)
        assert (await rollout.state()).stage == types_pb2.STAGE_RESUME_KV
    samples = await running
    drained = await draining
    assert (drained.num_finished, drained.num_cut) == (2, 0)
    assert {len(sample.token_ids) for sample in samples} == {250}
