"""The embedded SGLang Engine, started and stopped with the service and driven from its event loop."""

import asyncio
import logging
import signal
import time
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from inspect import iscoroutine
from multiprocessing.context import ForkProcess, SpawnProcess
from typing import Any, cast

import zmq
from sglang.srt.entrypoints.engine import Engine, SchedulerInitResult
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.network import get_zmq_socket

from tasuki.config.choices import read_choices
from tasuki.config.gpus import gpus_of
from tasuki.config.schema import NodeConfig
from tasuki.models.routes import RouteShape
from tasuki.rollout.arguments import ADAPTER_ID, engine_arguments
from tasuki.rollout.generate import CUT, Completion, EngineRequest
from tasuki.rollout.model import ModelFacts, check_capacity
from tasuki.rollout.ranks import RankProcesses, RankReport
from tasuki.rollout.request_queue import AT_ONCE, Answer, Call, Intake
from tasuki.rollout.sessions import SessionPlaces, shares
from tasuki.rollout.sglang.images import give_images
from tasuki.rollout.sglang.json_grammar import EngineTokenizer
from tasuki.rollout.sglang.scheduler import ignore_generation_config
from tasuki.rpc.process_start import freeze_started
from tasuki.wire.errors import InternalError

Launch = tuple[ServerArgs, PortArgs]
"""Start arguments of one replica's ranks."""


def launches_of(server_args: ServerArgs, port_args: PortArgs, *, num_replicas: int) -> list[Launch]:
    """The first replica uses SGLang's own sockets; the others have their own sockets and seed, and answer to the same front."""
    launches: list[Launch] = []
    for replica in range(num_replicas):
        # Otherwise replicas would draw the same samples of a prompt, and the metrics of all would be taken for one's.
        own = {"random_seed": (server_args.random_seed or 0) + replica, "extra_metric_labels": {"dp_rank": str(replica)}}
        ports = PortArgs.init_new(server_args) if replica else port_args
        for name in ("tokenizer_ipc_name", "detokenizer_ipc_name", "instance_id"):
            setattr(ports, name, getattr(port_args, name))
        launches.append((changed(server_args, **own if num_replicas > 1 else {}), ports))
    return launches


def changed(arguments: ServerArgs, **fields: Any) -> ServerArgs:
    """A copy of resolved arguments with other values, for which 0.5.23 has no method: it has to be unsealed."""
    arguments = deepcopy(arguments)
    if hasattr(arguments, "override"):
        arguments.override("tasuki", **fields)
        return arguments
    state = vars(arguments)
    is_sealed = state.pop("_resolution_finished")
    for name, value in fields.items():
        setattr(arguments, name, value)
    state["_resolution_finished"] = is_sealed
    return arguments


class ReplicaSockets:
    """Replaces the socket on which SGLang's front sends to its engine: messages go to every replica, except within `only`."""

    def __init__(self, manager: Any, ports: Sequence[PortArgs]) -> None:
        """manager: SGLang's TokenizerManager. ports: of every replica; the front has created the first one's socket."""
        first = manager.send_to_scheduler
        others = [get_zmq_socket(first.context, zmq.PUSH, one.scheduler_input_ipc_name, True) for one in ports[1:]]
        self._every = self._addressed = [first, *others]
        manager.send_to_scheduler = self

    def send_pyobj(self, message: Any, **settings: Any) -> None:
        """Called by SGLang."""
        for socket in self._addressed:
            socket.send_pyobj(message, **settings)

    @contextmanager
    def only(self, replica: int) -> Iterator[None]:
        """Must not be held across a suspension."""
        self._addressed = [self._every[replica]]
        try:
            yield
        finally:
            self._addressed = self._every


_log = logging.getLogger(__name__)
_NOT_BEGUN = Completion((), (), CUT)
_WARM_UP_ON_CPU = 16
"""Tokens of the longest prefill that warms an engine on a CPU, where nothing is compiled by length."""


class RolloutEngine:
    """All replicas of the engine and their rank processes. Create it with `start_engine`, in the main thread, in the running loop."""

    def __init__(
        self,
        engine: "_EmbeddedEngine",
        reports: Sequence[RankReport],
        model: ModelFacts,
        *,
        on_death: Callable[[], None],
        on_stop: Callable[[], None],
    ) -> None:
        """reports: of all ranks, ordered by replica."""
        self.model = model
        self.reports = reports
        self.num_replicas = len(engine.launches)
        self.num_finished = 0
        self.num_cut = 0
        self._engine = engine
        self._requests: Any = engine.tokenizer_manager
        self._requests.auto_create_handle_loop()
        # Replaces SGLang's handlers, which that installed. SGLang sends SIGQUIT when a rank dies.
        for number, handler in ((signal.SIGQUIT, on_death), (signal.SIGTERM, on_stop), (signal.SIGINT, on_stop)):
            asyncio.get_running_loop().add_signal_handler(number, handler)
        self._requests.tokenizer = EngineTokenizer.of(self._requests.model_config)
        self._sockets = ReplicaSockets(self._requests, [ports for _, ports in engine.launches])
        # Queue as many requests in the schedulers as can run, so that these never wait for the event loop.
        most = AT_ONCE + 2 * sum(report["max_running_requests"] for report in reports[:: self.tp_size])
        self._intake = Intake(self._submit, room=lambda: most - len(self._requests.rid_to_state))
        self._continued: set[Call] = set()
        self._idle = asyncio.Event()
        self._sessions = SessionPlaces()

    @property
    def num_running(self) -> int:
        """Requests not yet submitted, plus those in the engine that are unanswered or not yet confirmed as aborted."""
        return len(self._requests.rid_to_state) + self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Requests not yet submitted."""
        return self._intake.num_waiting

    async def become_idle(self, *, timeout_s: float) -> None:
        """Returns when the last running request ends, or after `timeout_s`."""
        self._idle.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def generate(
        self,
        requests: Iterator[EngineRequest],
        *,
        num_requests: int,
        prefix: str,
        session_key: str = "",
        cut_on_drain: bool = False,
    ) -> AsyncGenerator[list[tuple[int, Completion]], None]:
        """Runs all requests in the engine; yields index and completion of each as it ends.

        prefix: common to the ids of these requests and no others. session_key: if not empty, keeps calls on one replica.
        cut_on_drain: `cut_continued` ends them. All requests count as running before the first suspension. Closing the generator aborts
        those still running.
        """
        call = Call(requests, num_requests=num_requests, prefix=prefix, session_key=session_key)
        self._intake.enter(call)
        if cut_on_drain:
            self._continued.add(call)
        try:
            while ended := await call.ended():
                yield [
                    (index, _NOT_BEGUN if answer is None else _completion(answer, self.model.routes)) for index, answer in ended
                ]
        finally:
            self._intake.leave(call)
            self._continued.discard(call)
            if call.num_in_engine:
                # One message, because for each a scheduler searches its whole queue.
                self._requests._dispatch_to_scheduler(AbortReq(rid=prefix))

    async def warm_up(self) -> None:
        """Runs prefills of growing length and two decoding steps on every replica: what the first batches compile is compiled then.

        Kernels of attention, experts and sampling are chosen by the number of tokens. Raises what SGLang raises.
        """
        server_args = self._requests.server_args
        prefill = 0 if server_args.device == "cpu" else server_args.chunked_prefill_size or 0
        room = min(self.model.context_length, self.num_kv_tokens // self.num_replicas) - 2
        longest = min(max(prefill, _WARM_UP_ON_CPU), room)
        lengths = sorted({*(4**power for power in range(8) if 4**power < longest), max(longest, 1)})
        sampling = {"max_new_tokens": 2, "ignore_eos": True, **({"sampling_seed": 0} if self.model.is_seeded else {})}
        num_tokens = 0
        for number, length in enumerate(lengths):
            # Another token each time: no prefix is found in the cache.
            prompt = [number % self.model.vocab_size] * length
            requests = (EngineRequest(f"warm-{length}-{index}.", prompt, sampling) for index in range(self.num_replicas))
            async for ended in self.generate(requests, num_requests=self.num_replicas, prefix=f"warm-{length}-"):
                num_tokens += sum(len(completion.token_ids) for _, completion in ended)
        _log.info("event=warmed_up prompt_tokens=%s new_tokens=%d", ",".join(map(str, lengths)), num_tokens)

    def _submit(self, call: Call) -> None:
        """Submits the next part of a call to the ranks, in one message per replica. Raises InternalError."""
        first, requests = call.take()
        manager = self._requests
        manager.auto_create_handle_loop()
        batch = GenerateReqInput(
            rid=[request.id for request in requests],
            input_ids=[list(request.token_ids) for request in requests],
            sampling_params=[dict(request.sampling) for request in requests],
            return_logprob=True,
            logprob_start_len=-1,
            return_routed_experts=self.model.routes is not None,
        )
        if manager.server_args.enable_lora:
            batch.lora_id = [ADAPTER_ID for _ in requests]
        batch.normalize_batch_and_arguments()
        manager._init_req_state(batch)
        states = [manager.rid_to_state[request.id] for request in requests]
        try:
            for index, state in enumerate(states, start=first):
                # Replaces an event: waking a task for each request would cost more than a small model's tokens.
                state.event = _EndSignal(self, call, index, state)
            tokenized = [
                manager._create_tokenized_object(one, None, one.input_ids)
                for one in map(batch.__getitem__, range(len(requests)))
            ]
            self._send(states, tokenized, requests, session_key=call.session_key)
        except Exception as error:
            for request in requests:
                manager.rid_to_state.pop(request.id, None)
            raise InternalError(f"SGLang refused requests that had passed our checks: {error}") from error

    def _send(
        self, states: Sequence[Any], tokenized: Sequence[Any], requests: Sequence[EngineRequest], *, session_key: str
    ) -> None:
        """Sends each request to one of the replicas."""
        counts = Counter(state.event.replica for state in self._requests.rid_to_state.values())
        running = [counts[replica] for replica in range(self.num_replicas)]
        parts = shares(running, len(tokenized))
        if session_key:
            place = self._sessions.place(session_key, running)
            parts = [range(len(tokenized) * (replica == place)) for replica in range(self.num_replicas)]
        for replica, share in enumerate(parts):
            for index in share:
                states[index].event.replica = replica
            if share:
                own = slice(share.start, share.stop)
                if self.model.images is not None:
                    give_images(tokenized[own], requests[own], merge_size=self.model.images.merge_size)
                with self._sockets.only(replica):
                    sent = self._requests._send_batch_request(tokenized[own])
                    if iscoroutine(sent):  # since SGLang 0.5.23, where it waits for images alone
                        with suppress(StopIteration):
                            sent.send(None)

    def cut_all(self) -> None:
        """Ends every request with the tokens it has so far."""
        self.num_cut += self._intake.cut()
        self._requests.abort_request(abort_all=True)

    def cut_continued(self) -> None:
        """Ends the requests of calls with cut_on_drain, whose callers continue them, with the tokens they have so far."""
        for call in self._continued:
            self._intake.leave(call)
            self.num_cut += call.cut()
            if call.num_in_engine:
                self._requests._dispatch_to_scheduler(AbortReq(rid=call.prefix))

    def ended(self, answer: Answer) -> None:
        """Handles a request that has left the engine."""
        is_cut = answer["meta_info"]["finish_reason"]["type"] == CUT
        self.num_cut += is_cut
        self.num_finished += not is_cut
        self._intake.notice_room()
        if not self.num_running:
            self._idle.set()

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return len(self.reports)

    @property
    def tp_size(self) -> int:
        return self.num_ranks // self.num_replicas

    @property
    def num_kv_tokens(self) -> int:
        """Capacity of the KV caches of all replicas, in tokens."""
        return sum(report["max_total_num_tokens"] for report in self.reports[:: self.tp_size])

    def stop(self) -> None:
        """Ends the rank processes and waits until they are gone."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, lambda: None)  # ranks may fail together
        self._intake.close()
        self._engine.shutdown()


def start_engine(
    config: NodeConfig, model: ModelFacts, ranks: RankProcesses, *, on_death: Callable[[], None], on_stop: Callable[[], None]
) -> RolloutEngine:
    """Loads the model on the ranks; blocks the event loop meanwhile. The caller remains responsible for killing the ranks.

    on_death: called in the loop when a rank process dies. on_stop: called there on SIGTERM and SIGINT, once the engine runs.
    Raises InternalError, or InvalidArgument if the KV cache turns out too small.
    """
    started = time.monotonic()
    ignore_generation_config()
    _EmbeddedEngine.ranks, _EmbeddedEngine.gpus = ranks, gpus_of(config).rollout
    engine = _EmbeddedEngine(**engine_arguments(config, read_choices(config.state_dir), model))
    reports = cast(list[RankReport], engine._scheduler_init_result.scheduler_infos)
    num_tokens = min(report["max_total_num_tokens"] for report in reports)
    check_capacity(num_tokens, model)
    freeze_started()
    _log.info(
        "event=engine_started architecture=%s replicas=%d tp_size=%d seconds=%.1f weight_bytes=%d kv_cache_bytes=%d kv_cache_tokens=%d",
        model.architecture,
        config.dp_size,
        config.rollout.tp_size,
        time.monotonic() - started,
        sum(report["weight_bytes"] for report in reports),
        sum(report["kv_cache_bytes"] for report in reports),
        num_tokens,
    )
    return RolloutEngine(engine, reports, model, on_death=on_death, on_stop=on_stop)


class _EndSignal:
    """Replaces the event that SGLang sets when a request has news."""

    def __init__(self, engine: RolloutEngine, call: Call, index: int, state: Any) -> None:
        self._engine, self._call, self._index, self._state = engine, call, index, state
        self.replica: int | None = None
        """The replica that has the request; None before it is sent."""

    def set(self) -> None:
        if self._state.finished:
            answer = self._state.out_list[-1]
            self._engine.ended(answer)
            self._call.end(self._index, answer)


def _completion(answer: Answer, routes: RouteShape | None) -> Completion:
    """Raises InternalError if SGLang reports that the request failed, or has reported too few experts."""
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    if reason.get("status_code") is not None:
        raise InternalError(f"SGLang ended a request with {reason['status_code']}: {reason.get('message')}")
    log_probs = [entry[0] for entry in meta.get("output_token_logprobs", ())]
    if routes is None:
        return Completion(answer["output_ids"], log_probs, reason["type"])
    content = b64decode(meta.get("routed_experts", ""))
    if reason["type"] == CUT and not content:  # cut while it waited for room that it had lost
        return _NOT_BEGUN
    num_tokens = meta["prompt_tokens"] + len(answer["output_ids"]) - 1
    if len(content) != num_tokens * routes.token_bytes:
        text = f"SGLang answered with {len(content)} bytes of experts for {num_tokens} tokens of {routes.token_bytes}"
        raise InternalError(text)
    return Completion(answer["output_ids"], log_probs, reason["type"], content)


class _EmbeddedEngine(Engine):
    """Engine over existing rank processes, without a detokenizer, since no text is produced."""

    ranks: RankProcesses
    gpus: tuple[int, ...]
    launches: Sequence[Launch]
    """Sockets of every replica."""

    @classmethod
    def _launch_scheduler_processes(
        cls, server_args: ServerArgs, port_args: PortArgs, run_scheduler_process_func: Callable[..., None]
    ) -> tuple[SchedulerInitResult, list[SpawnProcess | ForkProcess]]:
        # A rank that cannot start reports that through its pipe. SGLang's handler of this signal would kill us before we read it.
        signal.signal(signal.SIGQUIT, lambda *_: None)
        tp_size = server_args.tp_size
        cls.launches = launches_of(server_args, port_args, num_replicas=len(cls.gpus) // tp_size)
        # Of SGLang's kinds of parallelism only this one; replicas are engines of their own behind one front.
        cls.ranks.launch([(*cls.launches[rank // tp_size], gpu, rank % tp_size) for rank, gpu in enumerate(cls.gpus)])
        pids = [process.pid for process in cls.ranks.processes if process.pid is not None]
        result = SchedulerInitResult(scheduler_infos=[], all_child_pids=pids)
        result.wait_for_ready = lambda: result.scheduler_infos.extend(map(dict, cls.ranks.wait_for_reports()))
        return result, cls.ranks.processes

    def shutdown(self) -> None:
        """Ends the ranks. SGLang's version also kills multiprocessing's resource tracker, leaving its semaphores in /dev/shm."""
        watchdog = None if self.tokenizer_manager is None else self.tokenizer_manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()
        self.ranks.kill()

    @classmethod
    def _launch_detokenizer_subprocesses(  # pyright: ignore[reportIncompatibleMethodOverride]  takes whatever it is given
        cls, **_: Any
    ) -> tuple[list[SpawnProcess], list[str]]:
        return [], []
