"""Sample seeds: what repeats and what does not, across a killed service and a training phase."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasuki.rollout.generate import EngineRequest
from tasuki.rollout.rollout import Rollout
from tasuki.rollout.seeds import CallNumbers, CallSeeds, question, sample_seed
from tasuki.v1.rollout_pb2 import GenerateRequest
from tasuki.wire.stages import Stage
from tests.unit.test_rollout_stages import MODEL, RING, EasySync, IdleEngine, NoMemory, move, said


class SeededEngine(IdleEngine):
    """Records the seeds that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.model = replace(MODEL, is_seeded=True)
        self.seeds: list[object] = []

    def generate(self, requests: Iterator[EngineRequest], *, num_requests: int, prefix: str, **options: Any):
        taken = list(requests)
        self.seeds += [request.sampling["sampling_seed"] for request in taken]
        return super().generate(iter(taken), num_requests=num_requests, prefix=prefix, **options)


class Node:
    """A rollout service that can be killed, with its client's calls."""

    def __init__(self, path: Path, *, instance_id: str = "node") -> None:
        self._path, self._instance_id = path, instance_id
        self.start()

    def start(self) -> None:
        """Starts the service, or restarts it after a kill that closed nothing."""
        seeds = CallSeeds(0, CallNumbers(self._path, instance_id=self._instance_id))
        self.engine = SeededEngine()
        self.rollout = Rollout(self.engine, EasySync(), NoMemory(), seeds=seeds, on_serving=said, on_poison=lambda: None)

    async def wake(self, version: int) -> None:
        if self.rollout.stage is Stage.RESUME_KV:
            for stage in RING[3:]:
                await move(self.rollout, stage)
        for stage in RING[:3]:
            await move(self.rollout, stage, version=version)

    async def ask(self, call: str = "", *, seed: int | None = None, prompts: int = 2, first_prompt: int = 0) -> list[object]:
        """Returns the seeds of `prompts` equal prompts' samples."""
        request = _request([[1]] * prompts, max_new_tokens=1, sampling_seed=seed)
        request.request_id, request.first_prompt = call, first_prompt
        before = len(self.engine.seeds)
        assert sum([len(ended) async for ended in self.rollout.generate(request)]) == 2 * prompts
        return self.engine.seeds[before:]


def _request(prompts: list[list[int]], **sampling: int | None) -> GenerateRequest:
    """Two samples of each prompt."""
    given = {"prompts": [{"token_ids": token_ids} for token_ids in prompts], "num_samples": 2}
    return GenerateRequest(**given, sampling_params={name: value for name, value in sampling.items() if value is not None})


def test_a_seed_is_the_documented_hash() -> None:
    digest = hashlib.sha256(b"-7/3/11").digest()
    assert sample_seed(-7, prompt=3, sample=11) == int.from_bytes(digest, "big") >> (256 - 62)


def test_a_question_is_the_prompts_as_they_are_split_and_all_that_is_asked_of_them() -> None:
    asked = _request([[1, 2], [3]], top_k=1)
    others = [_request([[1], [2, 3]], top_k=1), _request([[1, 2], [4]], top_k=1), _request([[1, 2], [3]], top_k=2)]
    more, later = _request([[1, 2], [3]], top_k=1), _request([[1, 2], [3]], top_k=1)
    more.num_samples, later.first_prompt = 3, 1
    assert len({question(one) for one in (asked, *others, more, later)}) == 6
    again = _request([[1, 2], [3]], top_k=1)
    again.request_id = "a"
    assert question(again) == question(asked)


async def test_a_run_whose_rollout_is_killed_draws_what_an_undisturbed_one_draws(tmp_path: Path) -> None:
    """Calls have new ids in every run, and a lost call is repeated under its id."""
    calm = Node(tmp_path / "calm")
    await calm.wake(4)
    expected = [await calm.ask("one"), await calm.ask("two")]
    await calm.wake(4)
    expected += [await calm.ask("three"), await calm.ask("four")]

    struck = Node(tmp_path / "struck")
    await struck.wake(4)
    drawn = [await struck.ask("a"), await struck.ask("b")]
    await struck.wake(4)
    await struck.ask("c")
    struck.start()
    await struck.wake(4)
    drawn += [await struck.ask("c"), await struck.ask("d")]
    assert drawn == expected


async def test_a_node_that_starts_from_its_model_begins_to_count_again(tmp_path: Path) -> None:
    first = Node(tmp_path / "calls", instance_id="first")
    await first.wake(0)
    seeds = await first.ask()
    second = Node(tmp_path / "calls", instance_id="second")
    await second.wake(0)
    assert await second.ask() == seeds


def test_a_line_that_was_cut_off_by_a_kill_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    calls = CallNumbers(path, instance_id="")
    calls.begin_version(3)
    assert [calls.number("q", call_id=call) for call in ("a", "b")] == [0, 1]
    path.write_text(path.read_text()[:-4])
    again = CallNumbers(path, instance_id="")
    again.begin_version(3)
    assert [again.number("q", call_id=call) for call in ("b", "c")] == [1, 2]
    last = CallNumbers(path, instance_id="")
    last.begin_version(3)
    assert [last.number("q", call_id=call) for call in ("a", "b", "c")] == [0, 1, 2]
