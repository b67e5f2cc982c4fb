"""The engine's memory: our arenas in place of SGLang's memory saver, and a model that trainer and engine read in one copy.

SGLang's own loader fills that copy, or finds it filled. Every parameter of SGLang's model lies in it as SGLang has it: q, k and v one
behind the other, gate and up. A rank's rows or columns of a checkpoint tensor are a run of its parameter's rows then, which the trainer's
shard is a view of.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, cast

import torch
from sglang.srt.model_executor.model_runner_components import load_model_utils
from sglang.srt.model_executor.runner_utils import pool as graph_pool
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from torch.overrides import TorchFunctionMode

from tasuki.config.paths import base_socket_path
from tasuki.config.schema import NodeConfig
from tasuki.memory.arena import NativeAllocator
from tasuki.rollout.record import EngineModel, Parameters, check_plan, published_layout, record
from tasuki.weights.manifest import Entry, place
from tasuki.weights.plan import Piece, held_slice
from tasuki.weights.shared_base import SharedBase, WritableBase, find_base
from tasuki.wire.errors import BadHandle, InternalError, UnsupportedModel
from tasuki.wire.stages import MemoryTag


def install_saver(allocator: NativeAllocator) -> None:
    """Places SGLang's tagged allocations in the allocator's arenas. Must be called before the engine is built."""
    saver = ArenaSaver(allocator)
    TorchMemorySaverAdapter.create = cast(Any, staticmethod(lambda enable: saver))
    if MemoryTag.CUDA_GRAPH in allocator.tags:
        # Used by every graph backend, with or without a saver; what a capture allocates is then paused with the tag.
        graph_pool.set_global_graph_memory_pool(allocator.cuda_regions().pool(MemoryTag.CUDA_GRAPH).id)


class ArenaSaver(TorchMemorySaverAdapter):
    """SGLang's interface to pausable memory."""

    def __init__(self, allocator: NativeAllocator) -> None:
        self._allocator = allocator

    @property
    def enabled(self) -> bool:
        return True

    def configure_subprocess(self) -> AbstractContextManager[None]:
        """Skips the library that torch_memory_saver would preload."""
        return nullcontext()

    def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager[None]:
        return self._allocator.region(MemoryTag(tag))

    @contextmanager
    def cuda_graph(self, *, tag: str, cuda_graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
        options["pool"] = self._allocator.cuda_regions().pool(tag).id
        with torch.cuda.graph(cuda_graph, **options):
            yield

    def disable(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pause(self, tag: str) -> NoReturn:
        """Refuses: SGLang's own calls end the engine if repeated; rank.py has ours."""
        raise InternalError(f"{tag} is paused by the rollout service, not by SGLang")

    def resume(self, tag: str) -> NoReturn:
        raise InternalError(f"{tag} is resumed by the rollout service, not by SGLang")


# What fills a parameter that is about to be loaded. A plan covers every element, so nothing of it would be left.
_FILLING = frozenset({"fill_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_", "zero_"})


class EngineBase:
    """The base that one engine rank shares. `base` is None until its model has been loaded."""

    def __init__(self, config: NodeConfig, *, rank: int, device: torch.device) -> None:
        self.base: SharedBase | None = None
        self._device, self._rank, self._num_ranks = device, rank, config.rollout.tp_size
        self._own_path = base_socket_path(config.state_dir, "rollout", rank)
        self._trainer_path = base_socket_path(config.state_dir, "trainer", rank)
        self._layout = published_layout(config)

    def install(self) -> None:
        """From now on SGLang loads its model into the base."""
        load_model_utils.get_model_loader = cast(Any, self._loader)

    def fill(self, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gives the parameters of `model`, which have no memory yet, that of the base: the trainer's, or a new one with `weights`."""
        parameters = dict(model.named_parameters())
        entries, _ = place(_whole_entry(name, parameter) for name, parameter in parameters.items())
        base = find_base(self._trainer_path, device=self._device)
        if base is None:
            writable = WritableBase(entries, device=self._device)
            _bind(parameters, writable.tensors())
            _load(model, weights, device=self._device)
            base = writable.publish(self._checkpoint_entries(model, entries), rank=self._rank, num_ranks=self._num_ranks)
            _bind(parameters, base.tensors_at(entries))
            writable.close()
        else:
            _bind(parameters, base.tensors_at(entries))
            _load(model, (), device=self._device)
            if tuple(self._checkpoint_entries(model, entries)) != base.manifest.entries:
                raise BadHandle("the trainer's base has another layout than the engine's model", socket=self._trainer_path)
        base.hand_out(self._own_path)
        self.base = base

    def _loader(self, load_config: Any, model_config: Any = None) -> DefaultModelLoader:
        return _BaseLoader(load_config, self)

    def _checkpoint_entries(self, model: torch.nn.Module, entries: Sequence[Entry]) -> list[Entry]:
        """Where the checkpoint's tensors are, by SGLang's own loader. Raises UnsupportedModel for one whose slice is not in one piece."""
        plan, parameters = record(cast(EngineModel, model), self._layout), Parameters(cast(EngineModel, model))
        for name in plan.fallback_names:
            raise UnsupportedModel(
                f'rollout.lora: the engine computes with {name} when it loads it, and cannot share it; use "merged"',
                tensor=name,
            )
        check_plan(plan, parameters, self._layout)
        starts = {entry.name: entry.arena_offset for entry in entries}
        # A tensor may go to several parameters: Gemma 3's embedding, whole, and a rank's rows of it to the head.
        pieces: defaultdict[str, defaultdict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
        for piece in plan.pieces:
            pieces[piece.name][piece.parameter].append(piece)
        found: list[Entry] = []
        for name, (shape, _) in self._layout.items():
            held = ((parameter, held_slice(written, shape)) for parameter, written in pieces[name].items())
            parameter, at = next((one for one in held if one[1] is not None), ("", None))
            if at is None:
                raise UnsupportedModel(
                    f'rollout.lora: the engine does not hold {name} as the checkpoint does, and cannot share it; use "merged"',
                    tensor=name,
                )
            dtype = parameters.dtype(parameter)
            start, offsets, sizes = at
            offset = starts[parameter] + start * dtype.itemsize
            found.append(Entry(name, str(dtype).removeprefix("torch."), shape, offsets, sizes, offset))
        return found


class _BaseLoader(DefaultModelLoader):
    """SGLang's loader, whose model has no memory until it is given that of the base."""

    def __init__(self, load_config: Any, engine_base: EngineBase) -> None:
        super().__init__(load_config)
        self._engine_base, self._unmade = engine_base, _Unmade()

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        with self._unmade:
            return super().load_model(model_config=model_config, device_config=device_config)

    # SGLang's is static, and called on the loader all the same.
    def load_weights_and_postprocess(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], target_device: torch.device
    ) -> None:
        self._unmade.finish(model)
        self._engine_base.fill(model, weights)


class _Unmade(TorchFunctionMode):
    """Makes empty tensors of one element, expanded, and does not fill them: two copies of the model never need to fit at once."""

    is_on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if self.is_on and func is torch.empty:
            shape = func(*args, **{**options, "device": "meta"}).shape
            return func(1, **options).expand(shape)
        # Functions of torch.nn.init name it.
        filled = args[0] if args else options.get("tensor")
        if self.is_on and getattr(func, "__name__", "") in _FILLING and _is_unmade(filled):
            return filled
        return func(*args, **options)

    def finish(self, model: torch.nn.Module) -> None:
        """From now on tensors are made as ever. Raises UnsupportedModel when one that is no parameter has no memory."""
        self.is_on = False
        for name, module in model.named_modules():
            for key, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items():
                if _is_unmade(value):
                    raise UnsupportedModel(
                        f'rollout.lora: the engine keeps {name}.{key} beside its weights, and cannot share it; use "merged"',
                        tensor=name,
                    )


def _is_unmade(value: object) -> bool:
    """Whether it is a tensor without memory for all its elements."""
    return isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() < value.nbytes


def _whole_entry(name: str, parameter: torch.Tensor) -> Entry:
    shape = tuple(parameter.shape)
    return Entry(name, str(parameter.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape)


def _bind(parameters: Mapping[str, torch.nn.Parameter], tensors: Sequence[torch.Tensor]) -> None:
    for parameter, tensor in zip(parameters.values(), tensors, strict=True):
        parameter.data = tensor


def _load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], *, device: torch.device) -> None:
    """SGLang's own. Raises UnsupportedModel where that moves a parameter elsewhere."""
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    DefaultModelLoader.load_weights_and_postprocess(model, weights, device)
    after = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            raise UnsupportedModel(
                f'rollout.lora: the engine packs {name} on this machine, and cannot share it; use "merged"',
                tensor=name,
            )
