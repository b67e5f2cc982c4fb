"""The front's side of an engine: first batches, idleness, replicas, images, and schemas that no text follows."""

import asyncio
import json
import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.server_args import PortArgs, ServerArgs

from tasuki.models.images import Prepared
from tasuki.rollout.generate import EngineRequest
from tasuki.rollout.request_queue import Intake
from tasuki.rollout.serve import Shutdown, warm_up
from tasuki.rollout.sessions import shares
from tasuki.rollout.sglang.engine import RolloutEngine, launches_of
from tasuki.rollout.sglang.images import give_images
from tasuki.rollout.sglang.json_grammar import check_schema
from tasuki.wire.errors import DeadlineExceeded, InternalError, InvalidArgument


class Endless:
    """An engine that never answers."""

    was_cut = False

    async def warm_up(self):
        try:
            await asyncio.Event().wait()
        finally:
            self.was_cut = True


@pytest.mark.parametrize("end", ["death", "stop", "deadline"])
async def test_first_batches_that_do_not_end_are_cut_and_a_dead_rank_is_named(end: str) -> None:
    engine, shutdown = Endless(), Shutdown(SimpleNamespace(unwatch=lambda: None))
    if end != "deadline":
        asyncio.get_running_loop().call_soon(shutdown.on_death if end == "death" else shutdown.stop.set)
    raised = {"death": InternalError, "deadline": DeadlineExceeded}.get(end)
    with pytest.raises(raised) if raised else nullcontext():
        await warm_up(engine, shutdown, timeout_s=0.05 if end == "deadline" else 60)
    assert engine.was_cut


ENDED = {"meta_info": {"finish_reason": {"type": "stop"}}}


class TwoRequests(RolloutEngine):
    """Two requests are in the engine."""

    def __init__(self) -> None:
        self.num_finished = self.num_cut = 0
        self._requests = SimpleNamespace(rid_to_state={"first": None, "last": None})
        self._intake = cast(Intake, SimpleNamespace(num_waiting=0, notice_room=lambda: None))
        self._idle = asyncio.Event()


def test_a_wait_for_idleness_ends_with_the_last_request() -> None:
    async def run() -> None:
        engine = TwoRequests()
        waiting = asyncio.create_task(engine.become_idle(timeout_s=3600))
        for name in ("first", "last"):
            await asyncio.sleep(0.01)
            assert not waiting.done()
            del engine._requests.rid_to_state[name]
            engine.ended(ENDED)
        await asyncio.wait_for(waiting, 60)
        assert (engine.num_running, engine.num_finished) == (0, 2)

    asyncio.run(run())


def test_a_wait_for_idleness_ends_after_its_time() -> None:
    async def run() -> None:
        engine = TwoRequests()
        await engine.become_idle(timeout_s=0.01)
        assert engine.num_running == 2

    asyncio.run(run())


NUM_RUNNING = st.lists(st.integers(0, 500), min_size=1, max_size=8)


def test_requests_are_cut_into_runs_of_neighbours() -> None:
    assert shares([0, 0], 8) == [range(4), range(4, 8)]
    assert shares([0, 0, 0], 4) == [range(2), range(2, 3), range(3, 4)]
    assert shares([3], 5) == [range(5)]


def test_a_busier_replica_gets_fewer_requests() -> None:
    assert shares([6, 0, 2], 4) == [range(0), range(3), range(3, 4)]
    assert shares([100, 0], 1) == [range(0), range(1)]
    assert shares([1, 1], 0) == [range(0), range(0)]


@given(num_running=NUM_RUNNING, num_requests=st.integers(0, 2000))
def test_every_request_goes_to_one_replica_and_loads_stay_even(num_running: list[int], num_requests: int) -> None:
    given_out = shares(num_running, num_requests)
    assert [index for share in given_out for index in share] == list(range(num_requests))
    after = [running + len(share) for running, share in zip(num_running, given_out, strict=True)]
    lowest = min(after)
    assert all(total <= lowest + 1 for total, share in zip(after, given_out, strict=True) if share)


SELF = {"$ref": "#"}


@pytest.mark.parametrize(
    "schema",
    [
        SELF,
        {"anyOf": [SELF]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"properties": {"x": {"$ref": "#/properties/x"}}},
    ],
)
def test_a_schema_that_refers_to_itself_alone_is_refused(schema: object):
    with pytest.raises(InvalidArgument, match="json_schema: refers to itself"):
        check_schema(json.dumps(schema))


@pytest.mark.parametrize("schema", [{"properties": {"x": SELF}}, {"anyOf": [SELF, {"type": "null"}]}])
def test_a_schema_that_ends_somewhere_may_refer_to_itself(schema: object):
    check_schema(json.dumps(schema))


def test_each_replica_has_its_own_seed_and_label() -> None:
    arguments = ServerArgs(model_path="dummy", device="cpu", random_seed=5)
    if hasattr(arguments, "resolve_once"):  # from 0.5.23 on
        arguments.resolve_once()
    launches = [
        pickle.loads(pickle.dumps(each)) for each, _ in launches_of(arguments, PortArgs.init_new(arguments), num_replicas=3)
    ]
    assert [each.random_seed for each in launches] == [5, 6, 7]
    assert [each.extra_metric_labels for each in launches] == [{"dp_rank": name} for name in "012"]
    assert (arguments.random_seed, arguments.extra_metric_labels) == (5, None)


def test_images_of_a_prompts_samples_are_sent_once_and_each_sample_has_them() -> None:
    levels_PD = np.random.default_rng(0).integers(256, size=(2 * 64, 768), dtype=np.uint8)
    values_CL, grids_I3 = np.zeros((3, 256), np.float32), np.array([[1, 8, 8]] * 2)
    prompt = Prepared([7] * 34, [1] * 34, [1, 18], levels_PD, values_CL, grids_I3)
    requests = [EngineRequest(f"{index}.", prompt.token_ids, {"max_new_tokens": 1}, prompt) for index in range(5)]
    tokenized = [SimpleNamespace(mm_inputs=None) for _ in requests]
    give_images(tokenized, requests, merge_size=2)
    sent = [pickle.dumps(one) for one in tokenized]  # apart from each other, as SGLang does
    assert sum(map(len, sent)) < 1.5 * levels_PD.nbytes
    for one in [pickle.loads(each) for each in sent]:
        features = [item.feature.numpy() for item in one.mm_inputs.mm_items]
        np.testing.assert_array_equal(np.concatenate(features), levels_PD)
