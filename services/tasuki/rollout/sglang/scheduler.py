"""Runs in every engine rank's process, around SGLang's scheduler: reports what it holds, or why it could not start."""

import functools
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import signature
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from sglang.srt.configs import model_config
from sglang.srt.environ import envs
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.layers.attention import attention_registry
from sglang.srt.managers import mm_utils
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.model_executor import model_runner
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import PortArgs, ServerArgs

from tasuki.config.checks import replays_routes
from tasuki.config.choices import read_choices
from tasuki.config.engine_arguments import DRAFT_BLOCKS
from tasuki.config.gpus import gpu_not_shown
from tasuki.config.schema import NodeConfig
from tasuki.memory.arena import NativeAllocator, set_host_budget
from tasuki.models.known import read_model_shape
from tasuki.rollout.rank import EngineLock, EngineRank, rank_allocator
from tasuki.rollout.ranks import RankReport, reporting
from tasuki.rollout.receive import WeightReceiver
from tasuki.rollout.record import EngineModel, published_layout
from tasuki.rollout.sglang.adapter import AdapterBuffers, ScaledLora, UnpinnedLora, install_dense_lora, serve_adapter
from tasuki.rollout.sglang.cpu.attention import BatchedAttention, multinomial_with_seed
from tasuki.rollout.sglang.json_grammar import EngineTokenizer, JsonGrammars
from tasuki.rollout.sglang.memory import EngineBase, install_saver
from tasuki.rollout.sglang.models import install_float32_logits, install_model, install_routes, install_windows
from tasuki.rollout.sglang.receivers import FirstSamples, LendingReceiver
from tasuki.rpc.memory import staying_of_engine_rank
from tasuki.rpc.process_start import freeze_started
from tasuki.v1 import ranks_pb2
from tasuki.weights.gloo_peers import check_gloo_peers
from tasuki.wire.stages import MemoryTag

_PARTS = {"load_model": "weights", "alloc_memory_pool": "KV cache", "init_cuda_graphs": "graphs"}
"""Methods of SGLang's model runner, none of which calls another."""


def count_seconds(runner: type[Any]) -> dict[str, float]:
    """Measures these methods from now on. Returns seconds by part, filled as they run."""
    parts: dict[str, float] = {}
    for method, part in _PARTS.items():
        setattr(runner, method, _timed(getattr(runner, method), part, parts))
    return parts


def _timed(method: Any, part: str, parts: dict[str, float]) -> Any:
    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        try:
            return method(*args, **kwargs)
        finally:
            parts[part] = parts.get(part, 0.0) + time.monotonic() - started

    return timed


class RankScheduler:
    """SGLang's scheduler, as a rank's commands see it."""

    def __init__(self, scheduler: Any) -> None:
        """scheduler: SGLang's."""
        self._scheduler = scheduler

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running_batch.reqs)

    def is_idle(self) -> bool:
        return self._scheduler.is_fully_idle()

    def flush(self) -> bool:
        """Evicts every cached prefix and embedding of an image.

        False while a request runs, and until the scheduler has noticed that the last one ended.
        """
        # Prevents SGLang from collecting garbage and emptying torch's cache, which takes longer than everything else.
        if not self._scheduler.flush_cache(empty_cache=False):
            return False
        # Of a tower that the next weights may change. From 0.5.23 on it is in another module.
        if (cache := mm_utils.init_mm_embedding_cache.__globals__["embedding_cache"]) is not None:
            cache.clear()
        return True

    def forget_slots(self) -> None:
        """Zeroes the map from requests to cache slots, which lies in the cache's region."""
        self._scheduler.req_to_token_pool.req_to_token.zero_()

    def stream(self) -> AbstractContextManager[Any]:
        """The scheduler's, on a GPU."""
        return torch.cuda.stream(self._scheduler.schedule_stream)

    def load(self) -> ranks_pb2.LoadResult:
        num_kv_tokens, _ratio = self._scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()
        return ranks_pb2.LoadResult(
            num_running=self.num_running,
            num_queued=len(self._scheduler.waiting_queue),
            num_kv_tokens=max(0, num_kv_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """A scheduler's settings besides SGLang's arguments. config: None for an engine outside a node."""

    config: NodeConfig | None
    rank: int
    tp_rank: int
    allocator: NativeAllocator
    pipe_writer: Connection
    start_seconds: dict[str, float]
    """Duration of each part of SGLang's start that has run."""
    base: EngineBase | None = None
    """Where the trainer reads the engine's model."""


class ReportingScheduler(sglang_scheduler.Scheduler):
    """SGLang's scheduler as one of our engine ranks; reports what it holds, or why it could not start."""

    def __init__(self, *args: Any, setup: RankSetup, **kwargs: Any) -> None:
        self._setup, self._lock = setup, EngineLock()
        self._first_samples: FirstSamples | None = None
        with reporting(setup.pipe_writer):
            super().__init__(*args, **kwargs)

    def init_tokenizer(self) -> None:
        super().init_tokenizer()
        self.tokenizer = EngineTokenizer.of(self.model_config)

    def init_grammar_manager(self) -> None:
        super().init_grammar_manager()
        self.grammar_manager.grammar_backend = cast(Any, JsonGrammars(self.tokenizer, self.model_config.vocab_size))

    def get_init_info(self) -> dict[str, Any]:
        report = super().get_init_info()
        report["max_running_requests"] = self.max_running_requests
        report["weight_bytes"] = _weight_bytes(self)
        report["kv_cache_bytes"] = _kv_cache_bytes(self)
        if self.server_args.device == "cuda":
            # What warming up for CUDA graphs has cached belongs to a stream that is not used again.
            torch.cuda.empty_cache()
        num_drafts = self.server_args.speculative_num_draft_tokens
        if not self.spec_algorithm.is_none() and num_drafts is not None:
            self._prepare_drafts(num_tokens=(self.max_running_requests or 0) * num_drafts)
        if self.server_args.device == "cpu":
            _sample_by_seeds()
        report["plan_problem"] = self._become_engine_rank()
        report["start_seconds"] = dict(self._setup.start_seconds)
        freeze_started()  # SGLang collects garbage whenever it flushes its cache.
        return dict(report)

    def _prepare_drafts(self, *, num_tokens: int) -> None:
        started, device = time.monotonic(), torch.device(self._setup.allocator.device)
        vocab_size = self.model_config.vocab_size
        with reporting(self._setup.pipe_writer), torch.cuda.stream(self.forward_stream):
            compile_verification(vocab_size=vocab_size, device=device)
            reserve_verification(num_tokens=num_tokens, vocab_size=vocab_size, device=device)
        keep_drafts(self.draft_worker)
        self._setup.start_seconds["drafts"] = time.monotonic() - started

    def maybe_sleep_on_idle(self) -> None:
        if self._first_samples is not None and self._first_samples.is_holding:
            return
        with self._lock.released():
            super().maybe_sleep_on_idle()

    def _become_engine_rank(self) -> str:
        """Lets the front's commands reach the model, and takes the lock for the scheduler. Returns the problem of `_record_ahead`."""
        setup, lock, adapter, staying = self._setup, self._lock, self._served_adapter(), frozenset[MemoryTag]()
        if setup.config is not None:
            staying = staying_of_engine_rank(setup.config, read_choices(setup.config.state_dir), setup.rank)
        model = cast(EngineModel, self.tp_worker.model_runner.model)
        engine_rank = EngineRank(
            model,
            setup.allocator,
            rank=setup.rank,
            scheduler=RankScheduler(self),
            lock=lock,
            adapter=adapter,
            staying=staying,
            base=None if setup.base is None else setup.base.base,
        )
        engine_rank.receiver.warm_up()
        problem = self._record_ahead(engine_rank.receiver, adapter)
        lock.acquire()
        self.request_receiver = LendingReceiver(self.request_receiver, lock)
        if not self.server_args.disable_radix_cache:
            # With overlap a batch begins before the result of the one before it is known.
            self._first_samples = FirstSamples(self.request_receiver, num_iterations=2 if self.enable_overlap else 1)
            self.request_receiver = self._first_samples
        if setup.config is not None:
            engine_rank.join_node(setup.config)
        return problem

    def _record_ahead(self, receiver: WeightReceiver, adapter: AdapterBuffers | None) -> str:
        """Records the plan of the first sync, in a node. Returns why that was impossible, or nothing."""
        started, config = time.monotonic(), self._setup.config
        if config is None:
            return ""
        try:
            dtype = getattr(torch, config.rollout.dtype)
            receiver.record_ahead(published_layout(config) if adapter is None else adapter.layout(dtype))
        except Exception as error:  # noqa: BLE001 - the first sync records again and raises it, if it matters
            return f"{type(error).__name__}: {error}"
        self._setup.start_seconds["plan"] = time.monotonic() - started
        return ""

    def _served_adapter(self) -> AdapterBuffers | None:
        config = self._setup.config
        if config is None or config.served_adapter is None:
            return None
        manager = self.tp_worker.model_runner.lora_manager
        with reporting(self._setup.pipe_writer):
            return serve_adapter(manager, config.served_adapter, tp_rank=self._setup.tp_rank)


def run_scheduler(
    server_args: ServerArgs,
    port_args: PortArgs,
    gpu_id: int,
    tp_rank: int,
    *others: Any,
    config: NodeConfig | None = None,
    rank: int | None = None,
) -> None:
    """SGLang's `run_scheduler_process` with a scheduler that reports.

    others: end with the pipe for the report; SGLang's own engine gives ranks of parallelism that we do not use before it.
    config: of the node; None for an engine outside a node. rank: index among the ranks of all replicas; tp_rank by default.
    """
    pipe_writer: Connection = others[-1]
    if server_args.device == "cuda" and not _select_gpu(gpu_id, pipe_writer):
        return
    device = torch.device("cpu") if server_args.device == "cpu" else torch.device("cuda", gpu_id)
    with reporting(pipe_writer):
        allocator = _rank_memory(config, device)
        install_saver(allocator)
        _meet_in_private(port_args)
        is_shared = config is not None and read_choices(config.state_dir).shares_base
        setup = RankSetup(
            config=config,
            rank=tp_rank if rank is None else rank,
            tp_rank=tp_rank,
            allocator=allocator,
            pipe_writer=pipe_writer,
            base=EngineBase(config, rank=tp_rank, device=device) if is_shared and config is not None else None,
            start_seconds=count_seconds(model_runner.ModelRunner),
        )
        _install_scheduler(setup, device=server_args.device)
    run = sglang_scheduler.run_scheduler_process
    # SGLang 0.5.23 has pp_rank alone.
    unused = {"attn_cp_rank", "moe_dp_rank", "moe_ep_rank", "pp_rank"} & signature(run).parameters.keys()
    # On a CPU it finds the rank's cores by the number of its GPU.
    place = tp_rank if server_args.device == "cpu" else gpu_id
    run(server_args, port_args, place, tp_rank, dp_rank=None, pipe_writer=pipe_writer, **dict.fromkeys(unused, 0))


def _rank_memory(config: NodeConfig | None, device: torch.device) -> NativeAllocator:
    """Allocates within the rank's share of the host budget, if there is one."""
    if config is not None and config.memory.host_budget_bytes is not None:
        set_host_budget(config.memory.host_budget_bytes // config.num_engine_ranks)
    return rank_allocator(str(device))


def _meet_in_private(port_args: PortArgs) -> None:
    """Makes the ranks of a replica rendezvous through a file; SGLang's TCP store is open to every user of the machine."""
    # Next to the replica's sockets: the name is unique to this launch and replica.
    socket_path = port_args.scheduler_input_ipc_name.removeprefix("ipc://")
    envs.SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE.set(f"file://{socket_path}.store")
    check_gloo_peers()


def _select_gpu(gpu_id: int, pipe_writer: Connection) -> bool:
    """Returns False, with a report, if there is no such GPU."""
    if gpu_id >= torch.cuda.device_count():
        error = gpu_not_shown("rollout", gpu_id, num_shown=torch.cuda.device_count())
        pipe_writer.send(RankReport(status="failed", problem=error.message))
        return False
    torch.cuda.set_device(gpu_id)
    return True


def _install_scheduler(setup: RankSetup, *, device: str | None) -> None:
    """Makes SGLang create our scheduler instead of its own, and our parts instead of unsupported ones."""
    ignore_generation_config()
    stop_at_the_last_token()
    sglang_scheduler.Scheduler = cast(Any, functools.partial(ReportingScheduler, setup=setup))
    if setup.base is not None:
        setup.base.install()
    if setup.config is not None and device == "cuda":
        install_float32_logits()
        install_windows()
    shape = None if setup.config is None else read_model_shape(setup.config.model.path)
    if setup.config is not None and shape is not None:
        install_model(shape, device=device)
        if replays_routes(setup.config, shape):
            install_routes(shape, device=str(device))
    if setup.config is not None and setup.config.served_adapter is not None:
        install_dense_lora(setup.config.served_adapter)
        model_runner.LoRAManager = UnpinnedLora if device == "cpu" else ScaledLora
    if device == "cpu":
        attention_registry.ATTENTION_BACKENDS |= dict.fromkeys(("torch_native", "triton"), BatchedAttention)
    # It would write a file for a data-parallel balancer to /dev/shm that nobody removes.
    sglang_scheduler.create_load_snapshot_writer = _nothing


def stop_at_the_last_token() -> None:
    """Ends with STOP a completion that a stop token or text ends just as it is cut, or with its last allowed token.

    SGLang looks at the cut and at the length first. What is cut would be continued after its end.
    """
    update = Req.update_finish_state

    @functools.wraps(update)
    def update_finish_state(self: Any, new_accepted_len: int = 1) -> None:
        was_finished = self.finished()
        update(self, new_accepted_len)
        reason, length = self.finished_reason, self.finished_len
        is_early = isinstance(reason, FINISH_LENGTH) or (isinstance(reason, FINISH_ABORT) and reason.status_code is None)
        if was_finished or not is_early or not self.output_ids:
            return
        has_stopped = self._check_str_based_finish(new_accepted_len)
        has_stopped = has_stopped or self._check_token_based_finish(self.output_ids[-new_accepted_len:])
        if has_stopped and self.finished_len > self.sampling_params.max_new_tokens:  # by tokens that speculation drew beyond
            self.finished_reason, self.finished_len = reason, length

    Req.update_finish_state = update_finish_state


def ignore_generation_config() -> None:
    """Keeps the model's generation_config.json from SGLang. Its stop tokens are among ours; its samplers' defaults are for chats, and
    SGLang would not start with some values.
    """
    model_config.get_generation_config = cast(Any, _nothing)


def _sample_by_seeds() -> None:
    """Samples every request with its own seed. As a start argument, this setting would also require Triton kernels."""
    get_context().override("tasuki", enable_deterministic_inference=True)
    sglang_sampler.multinomial_with_seed = multinomial_with_seed


def _nothing(*args: object, **kwargs: object) -> None: ...


def _weight_bytes(scheduler: Any) -> int:
    parameters = scheduler.tp_worker.model_runner.model.parameters()
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _kv_cache_bytes(scheduler: Any) -> int:
    size = scheduler.token_to_kv_pool_allocator.get_kvcache().get_kv_size_bytes()
    return sum(size) if isinstance(size, tuple) else int(size)


def compile_verification(*, vocab_size: int, device: torch.device) -> None:
    """Compiles the kernels that filter the target distribution of drafts. Only sampling that is not greedy uses them.

    On a new machine FlashInfer compiles them with nvcc, which the first such request would otherwise wait for. vocab_size: of the target.
    """
    from sgl_kernel import top_k_renorm_prob, top_p_renorm_prob  # has them on CUDA only

    probs_BV = torch.full((1, vocab_size), 1 / vocab_size, device=device)
    most_likely_BV = top_k_renorm_prob(probs_BV, torch.full((1,), vocab_size, dtype=torch.int32, device=device))
    top_p_renorm_prob(most_likely_BV, torch.ones(1, device=device))


def reserve_verification(*, num_tokens: int, vocab_size: int, device: torch.device) -> None:
    """Makes torch cache what the largest verification needs, on the current stream.

    Otherwise a batch that grows leaves blocks behind that are too small for the next one, and the cache grows beyond the plan.
    num_tokens: drafted tokens of all requests.
    """
    blocks = [torch.empty((num_tokens, vocab_size), dtype=torch.float32, device=device) for _ in range(DRAFT_BLOCKS)]
    del blocks


def keep_drafts(worker: Any) -> None:
    """Keeps the n-grams of earlier samples when the KV cache is flushed.

    They depend on tokens alone, and every draft is verified. PAUSE_KV would wait until they are cleared, which is slow.
    """
    worker.clear_cache_pool = lambda: None
