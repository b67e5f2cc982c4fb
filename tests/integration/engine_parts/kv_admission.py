"""SGLang's admission over a growing KV cache: as over a whole one while there is memory, and nothing waits forever without it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from tasuki.rollout.growing_cache import GrowingCache
from tasuki.rollout.kv_demand import SPARE_PAGES, SchedulerDemand
from tasuki.rollout.kv_slots import BoundedTokenSlots
from tasuki.wire.errors import OutOfGpuMemory
from tests.extent import IS_WHOLE, examples
from tests.models import make_model, save_checkpoint

NUM_TOKENS, LONGEST, LEAST = 320, 56, 64
NEW_TOKEN_RATIOS = (0.3, 1.0)
"""A low ratio makes SGLang admit more requests than fit, and retract some."""
_EXTENT = settings(max_examples=examples(60), deadline=None, derandomize=not IS_WHOLE)


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sets up the process as SGLang's parts need it."""
    model = save_checkpoint(make_model("qwen2", seed=0), tmp_path_factory.mktemp("model") / "qwen2")
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: the number of batches before it arrives, and its length."""

    arrives: int
    prompt: Sequence[int]
    max_new_tokens: int
    num_new_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """Settings of an engine."""

    has_prefixes: bool = True
    new_token_ratio: float = NEW_TOKEN_RATIOS[0]


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    # Few prefixes, so that requests share some.
    prompt = [draw(st.integers(1, 3))] * draw(st.integers(1, 10)) + [9] * draw(st.integers(0, 10))
    most = draw(st.integers(1, LONGEST - len(prompt)))
    return Asked(draw(st.integers(0, 40)), prompt, most, draw(st.integers(1, most)), draw(st.booleans()))


QUESTIONS = st.lists(asked(), min_size=1, max_size=40)
KINDS = st.builds(Kind, st.booleans(), st.sampled_from(NEW_TOKEN_RATIOS))


class Room:
    """Replaces the arena: memory for a number of tokens."""

    def __init__(self) -> None:
        self.tokens = self.mapped = NUM_TOKENS

    def set_idle(self, spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
        mapped = NUM_TOKENS - sum(num_bytes for _, num_bytes in spans)
        if mapped > max(self.mapped, self.tokens):
            raise OutOfGpuMemory("full", needed_bytes=mapped - self.mapped, free_bytes=0)
        self.mapped = mapped
        return 0, 0


class Engine:
    """Parts of SGLang's scheduler that allocate KV cache; drawn lengths replace the model."""

    def __init__(self, kind: Kind, *, grows: bool) -> None:
        self.new_token_ratio = kind.new_token_ratio
        self.slots = BoundedTokenSlots(NUM_TOKENS, torch.uint8, "cpu", SimpleNamespace(), need_sort=False)
        self.rows = ReqToTokenPool(64, LONGEST + 8, "cpu", enable_memory_saver=False)
        params = CacheInitParams(False, self.rows, self.slots, page_size=1)
        self.prefixes: Any = RadixCache(params) if kind.has_prefixes else ChunkCache(params)
        self.scheduler: Any = SimpleNamespace(
            running_batch=SimpleNamespace(reqs=[], batch_is_full=False),
            last_batch=None,
            chunked_req=None,
            waiting_queue=[],
            page_size=1,
            tree_cache=self.prefixes,
            tp_cpu_group=dist.group.WORLD,
        )
        self.lengths: dict[str, int] = {}
        self.ended: list[str] = []
        self.num_batches = self.num_retracted = 0
        self.room: Any = Room()
        self.cache: GrowingCache | None = None
        self.num_coming, self.spare_tokens = 0, 0
        if grows:
            rows = torch.zeros(NUM_TOKENS + 1, 1, dtype=torch.uint8)
            demand = SchedulerDemand(self.scheduler)
            self.cache = GrowingCache(self.room, self.slots, [rows], least_tokens=LEAST, demand=demand)

    @property
    def running(self) -> list[Req]:
        return self.scheduler.running_batch.reqs

    def give(self, number: int, one: Asked) -> None:
        sampling = SamplingParams(max_new_tokens=one.max_new_tokens, ignore_eos=one.ignore_eos)
        self.lengths[str(number)] = one.num_new_tokens
        self.scheduler.waiting_queue.append(Req(str(number), "", array("q", one.prompt), sampling))
        self.num_coming += len(one.prompt) + one.max_new_tokens + SPARE_PAGES

    def look(self) -> None:
        """Grows the cache as KvGrowth makes the ranks do."""
        if self.cache is not None and (self.spare_tokens < 0 or self.num_coming > self.spare_tokens):
            self.cache.grow(lambda _: None)
            extent = self.cache.extent()
            self.num_coming, self.spare_tokens = 0, extent.served_tokens - extent.needed_tokens

    def run_batch(self) -> None:
        """Runs one batch as SGLang does: a prefill if a request can be admitted, else a token for each running one."""
        self.num_batches += 1
        if admitted := self._admitted():
            self._prefill(admitted)
        elif self.running:
            self._decode()
        taken = self.slots.end_of_use()
        assert taken <= self.room.mapped + 1, "a slot without a page"

    def _admitted(self) -> list[Req]:
        batch, queue = self.scheduler.running_batch, self.scheduler.waiting_queue
        if batch.batch_is_full or not queue:
            return []
        adder = PrefillAdder(1, self.prefixes, self.slots, batch, self.new_token_ratio, 64, None)
        for request in queue:
            request.init_next_round_input(self.prefixes)
            result = adder.add_one_req(request, has_chunked_req=False, truncation_align_size=None)
            if result != AddReqResult.CONTINUE:
                batch.batch_is_full = result == AddReqResult.NO_TOKEN
                break
        self.scheduler.waiting_queue = [request for request in queue if request not in adder.can_run_list]
        return adder.can_run_list

    def _prefill(self, requests: Sequence[Req]) -> None:
        self.rows.alloc(list(requests))
        for request in requests:
            assert request.extend_range is not None
            prefix, end = request.prefix_indices, request.extend_range.end
            slots = torch.cat((prefix.to(torch.int64), self._take(end - len(prefix))))
            self.rows.write((request.req_pool_idx, slice(0, end)), slots.to(torch.int32))
            request.kv_committed_len = request.kv_allocated_len = end
        self.running.extend(requests)
        for request in requests:
            if not self._ends(request):
                self.prefixes.cache_unfinished_req(request)

    def _decode(self) -> None:
        self._retract()
        for request in list(self.running):
            at = request.kv_allocated_len
            self.rows.write((request.req_pool_idx, slice(at, at + 1)), self._take(1).to(torch.int32))
            request.kv_committed_len = request.kv_allocated_len = at + 1
            self._ends(request)

    def _retract(self) -> None:
        """Sends the requests with the fewest tokens back to the queue, until each running one finds a slot."""
        while True:
            evict_from_tree_cache(self.prefixes, len(self.running))
            if self.slots.available_size() >= len(self.running):
                return
            assert len(self.running) > 1, "SGLang would fail a request that fits"
            request = min(self.running, key=lambda one: (len(one.output_ids), -len(one.origin_input_ids)))
            self._release(request, is_insert=False)
            request.reset_for_retract()
            self.scheduler.waiting_queue.append(request)
            self.num_retracted += 1

    def _ends(self, request: Req) -> bool:
        """Gives the request a token; returns whether it ends."""
        request.output_ids.append(4 + len(request.output_ids) % 4)
        if len(request.output_ids) < self.lengths[request.rid]:
            return False
        request.finished_reason = FINISH_LENGTH(len(request.output_ids))
        self._release(request, is_insert=True)
        self.ended.append(request.rid)
        return True

    def _release(self, request: Req, *, is_insert: bool) -> None:
        self.prefixes.cache_finished_req(request, is_insert=is_insert)
        self.rows.free(request)
        self.running.remove(request)
        self.scheduler.running_batch.batch_is_full = False

    def _take(self, num_slots: int) -> torch.Tensor:
        evict_from_tree_cache(self.prefixes, num_slots)
        slots = self.slots.alloc(num_slots)
        assert slots is not None, "SGLang would end the engine"
        return slots


def ran(questions: Sequence[Asked], kind: Kind, *, rooms: Sequence[int] | None, drains: bool = False) -> Engine:
    """rooms: tokens of memory after each batch; when the list ends, all; None: a whole cache that does not grow.

    drains: once all requests have arrived, the cache shrinks whenever one ends.
    """
    engine = Engine(kind, grows=rooms is not None)
    most = 50 + sum(len(one.prompt) + 2 * one.max_new_tokens for one in questions) * 4
    num_ended = -1
    while len(engine.ended) < len(questions):
        assert engine.num_batches < most, "requests wait for ever"
        for number, one in enumerate(questions):
            if one.arrives == engine.num_batches:
                engine.give(number, one)
        engine.room.tokens = (rooms or ())[engine.num_batches] if engine.num_batches < len(rooms or ()) else NUM_TOKENS
        if not drains or engine.num_batches <= 40:
            engine.look()
        elif engine.cache is not None and len(engine.ended) != num_ended:
            num_ended = len(engine.ended)
            engine.cache.shrink(lambda _: None)
        engine.run_batch()
    return engine


@given(questions=QUESTIONS, kind=KINDS)
@_EXTENT
def test_batches_are_those_of_a_whole_cache_while_there_is_memory(questions: list[Asked], kind: Kind) -> None:
    whole = ran(questions, kind, rooms=None)
    grown = ran(questions, kind, rooms=())
    assert (grown.num_batches, grown.num_retracted, grown.ended) == (whole.num_batches, whole.num_retracted, whole.ended)


@given(
    questions=QUESTIONS,
    kind=KINDS,
    rooms=st.lists(st.integers(LEAST, NUM_TOKENS), max_size=200),
    drains=st.booleans(),
)
@_EXTENT
def test_every_request_that_fits_runs_in_the_end_whatever_memory_there_is(
    questions: list[Asked], kind: Kind, rooms: list[int], drains: bool
) -> None:
    ran(questions, kind, rooms=rooms, drains=drains)


@given(questions=QUESTIONS, kind=KINDS)
@_EXTENT
def test_a_drain_retracts_nothing_that_a_whole_cache_would_not(questions: list[Asked], kind: Kind) -> None:
    whole = ran(questions, kind, rooms=None)
    drained = ran(questions, kind, rooms=(), drains=True)
    assert drained.num_retracted <= whole.num_retracted


def test_requests_are_admitted_once_the_cache_has_grown_before_another_one_ends() -> None:
    engine = Engine(Kind(), grows=True)
    for number in range(8):
        engine.give(number, Asked(0, [1, 2, 3], 25, 25))
    engine.run_batch()
    assert len(engine.running) < 8
    engine.look()
    engine.run_batch()
    assert len(engine.running) == 8


def test_a_scheduler_without_requests_needs_nothing() -> None:
    engine = Engine(Kind(), grows=True)
    assert engine.cache is not None and engine.cache.extent().needed_tokens == 0
    engine.give(0, Asked(0, [1, 2, 3], 25, 5))
    assert engine.cache.extent().needed_tokens == 3 + 25 + SPARE_PAGES
    while not engine.ended:
        engine.run_batch()
    # All tokens but the last remain as a prefix; that one was never computed with.
    assert engine.cache.extent().needed_tokens == 3 + 4


def test_room_that_admission_reserves_beside_the_requests_tokens_is_mapped() -> None:
    questions, kind = [Asked(0, [1, 2], 10, 10)] * 20, Kind(has_prefixes=False, new_token_ratio=1.0)
    assert ran(questions, kind, rooms=()).num_batches == ran(questions, kind, rooms=None).num_batches == 10
