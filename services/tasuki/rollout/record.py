"""Records an engine model's own `load_weights` as a copy plan: records views and copies without reading or writing weights.

The loader is called with tensors that have a name and a shape but no memory. A view of one is a view of its index space; a
`copy_` into a parameter is a piece of the plan; a constant fill of a parameter is a constant. Any other operation, also on a
parameter that it was copied to, makes its tensor a fallback, which each sync gathers and passes to the real `load_weights`.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tasuki.config.schema import NodeConfig
from tasuki.models.config_json import read_json_object
from tasuki.models.family import CheckpointNames
from tasuki.models.known import find_family, read_model
from tasuki.weights.plan import Constant, CopyPlan, FallbackWrite, Piece, Slice, check_coverage
from tasuki.wire.errors import BadHandle, UnsupportedModel

_aten = torch.ops.aten

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of every published tensor, by name."""


class EngineModel(Protocol):
    """The part of an SGLang model's interface that we use."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object: ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...


class PublishedTensors(Protocol):
    """The published tensors: names with shape and dtype, and the values of one."""

    def layout(self) -> Layout: ...

    def gathered(self, name: str) -> torch.Tensor: ...


def record(model: EngineModel, layout: Layout) -> CopyPlan:
    """Records what the model's loader does with tensors of `layout`, in the order of their names. Needs no values and touches no weights.

    Of `fallback_names` the plan has no writes yet: `complete_plan`. Raises UnsupportedModel if the loader does what a plan cannot express.
    """
    parameters = Parameters(model)
    layout = dict(sorted(layout.items()))
    fallback: set[str] = set()
    while True:
        recorder = _Recorder(parameters, device=parameters.device)
        recorder.run(model, {name: like for name, like in layout.items() if name not in fallback})
        if recorder.fallback <= fallback:
            break
        fallback |= recorder.fallback
    names = tuple(name for name in layout if name in fallback)
    # A loader that copies an embedding also to the LM head that it is tied to writes the same parameter twice.
    return CopyPlan(tuple(dict.fromkeys(recorder.pieces)), tuple(dict.fromkeys(recorder.constants)), names, ())


def complete_plan(plan: CopyPlan, model: EngineModel, published: PublishedTensors) -> CopyPlan:
    """Adds the writes of fallback tensors to a recording of the same layout, and checks it as `check_plan` does.

    Fallback tensors are really loaded, once, to see what they write. Raises UnsupportedModel if the loader replaces parameters.
    """
    parameters = Parameters(model)
    plan = replace(plan, fallback_writes=_observe_fallback(model, parameters, published, plan.fallback_names))
    check_plan(plan, parameters, published.layout())
    return plan


class Parameters:
    """A model's parameters by name and by address."""

    def __init__(self, model: EngineModel) -> None:
        self._by_name = {name: parameter.data for name, parameter in model.named_parameters()}
        spans = [(tensor.data_ptr(), name) for name, tensor in self._by_name.items() if tensor.numel()]
        self._starts, self._names = [list(column) for column in zip(*sorted(spans), strict=True)] if spans else ([], [])

    @property
    def device(self) -> torch.device:
        return next(iter(self._by_name.values())).device

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(tensor.dtype for tensor in self._by_name.values())

    def numels(self) -> dict[str, int]:
        return {name: tensor.numel() for name, tensor in self._by_name.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._by_name[name].dtype

    def view(self, name: str, at: Slice) -> torch.Tensor:
        """The slice as a live view of the parameter."""
        tensor = self._by_name[name]
        return tensor.as_strided(at.shape, at.strides, tensor.storage_offset() + at.offset)

    def locate(self, tensor: torch.Tensor) -> tuple[str, Slice] | None:
        """The parameter whose memory contains `tensor`, and where; None if there is none."""
        index = bisect_right(self._starts, tensor.data_ptr()) - 1
        if index < 0:
            return None
        name = self._names[index]
        parameter = self._by_name[name]
        distance = tensor.data_ptr() - self._starts[index]
        if distance >= parameter.numel() * parameter.element_size() or tensor.dtype != parameter.dtype:
            return None
        return name, Slice(distance // parameter.element_size(), tuple(tensor.shape), tensor.stride())

    def fingerprint(self) -> tuple[tuple[object, ...], ...]:
        """Changes if any parameter is moved, reshaped or replaced, which invalidates existing plans."""
        return tuple(
            (name, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            for name, tensor in self._by_name.items()
        )


class _Unrecordable(Exception):
    """Ends one recording at an operation that needs values; the tensors involved become fallbacks."""


class RecordingTensor(torch.Tensor):
    """A placeholder for a published tensor or a view of it: shape, strides and origin, no values."""

    index_space: torch.Tensor
    origin: frozenset[str]
    recorder: "_Recorder"
    parts: tuple[torch.Tensor, ...]
    """What it was concatenated from, other such tensors and zeros; empty for a part of one published tensor."""
    joined_dim: int

    @staticmethod
    def __new__(
        cls: "type[RecordingTensor]",
        index_space: torch.Tensor,
        origin: frozenset[str],
        recorder: "_Recorder",
        parts: tuple[torch.Tensor, ...] = (),
        dim: int = 0,
    ) -> "RecordingTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            index_space.shape,
            strides=index_space.stride(),
            storage_offset=index_space.storage_offset(),
            dtype=index_space.dtype,
            device=recorder.device,
        )
        tensor.index_space, tensor.origin, tensor.recorder = index_space, origin, recorder
        tensor.parts, tensor.joined_dim = parts, dim
        return cast(RecordingTensor, tensor)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        # Reached without the recorder's mode in a loader's own threads, where modes do not apply.
        recorder = next(arg.recorder for arg in _tensors(args, kwargs) if isinstance(arg, RecordingTensor))
        return recorder.handle(func, args, kwargs if kwargs is not None else {})


class _Recorder(TorchDispatchMode):
    """One recording of a loader."""

    def __init__(self, parameters: Parameters, *, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.pieces: list[Piece] = []
        self.constants: list[Constant] = []
        self.fallback: set[str] = set()
        self._parameters = parameters
        self._current: str | None = None

    def run(self, model: EngineModel, layout: Layout) -> None:
        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, (shape, dtype) in layout.items():
                self._current = name
                index_space = torch.empty(shape, dtype=dtype, device="meta")
                yield name, RecordingTensor(index_space, frozenset([name]), self)

        try:
            with self:
                model.load_weights(tensors())
        except _Unrecordable:
            return

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.handle(func, args, kwargs if kwargs is not None else {})

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sources = [arg for arg in _tensors(args, kwargs) if isinstance(arg, RecordingTensor)]
        if sources and func is _aten.copy_.default and not isinstance(args[0], RecordingTensor):
            self._note_copy(args[0], args[1])
            return args[0]
        if sources and func is _aten.cat.default and not kwargs:
            parts, dim = tuple(args[0]), (*args[1:], 0)[0]
            if all(isinstance(part, RecordingTensor) or not part.any() for part in parts):
                return self._joined(parts, dim, sources)
        if sources:
            return self._apply(func, args, kwargs, sources)
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and args[0].device.type != "meta":
            place = self._parameters.locate(args[0])
            if place is not None:
                self._note_fill(func, args, *place)
                return args[0]
        if not _is_view(func):
            self._note_reads(_tensors(args, kwargs))
        return func(*args, **kwargs)

    def _note_reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """What a loader computes from a parameter that it has written, later values must reach, too."""
        found = (self._parameters.locate(tensor) for tensor in tensors if tensor.device.type != "meta" and tensor.numel())
        read = {place[0] for place in found if place is not None}
        self.fallback |= {piece.name for piece in self.pieces if piece.parameter in read}

    def _note_copy(self, destination: torch.Tensor, source: RecordingTensor) -> None:
        if not destination.numel():
            return  # the rank holds no row of the tensor; an empty tensor has no address
        if source.parts:
            sizes = [each.shape[source.joined_dim] for each in source.parts]
            for place, part in zip(destination.split(sizes, source.joined_dim), source.parts, strict=True):
                if isinstance(part, RecordingTensor):
                    self._note_copy(place, part)
                elif (found := self._parameters.locate(place)) is not None:
                    self._note_fill(_aten.zero_.default, (place,), *found)
            return
        place = self._parameters.locate(destination)
        if place is None:
            self.fallback |= source.origin
        elif not source.origin & self.fallback:
            (name,) = source.origin
            space = source.index_space.expand(destination.shape)
            self.pieces.append(Piece(name, Slice(int(space.storage_offset()), tuple(space.shape), space.stride()), *place))

    def _joined(self, parts: tuple[torch.Tensor, ...], dim: int, sources: Sequence[RecordingTensor]) -> RecordingTensor:
        """A tensor that can be copied as a whole. Its views have no place in one published tensor, and become fallbacks."""
        space = torch.cat([_index_space(part).to("meta") for part in parts], dim)
        return RecordingTensor(space, frozenset[str]().union(*(source.origin for source in sources)), self, parts, dim)

    def _note_fill(self, func: Any, args: tuple[Any, ...], parameter: str, destination: Slice) -> None:
        if func is _aten.zero_.default:
            value = 0.0
        elif func in (_aten.fill_.Scalar, _aten.fill_.Tensor):
            value = float(args[1])
        elif self._current is not None:
            self.fallback.add(self._current)
            return
        else:
            raise UnsupportedModel(f"load_weights writes {parameter} by {func} before it reads a tensor", parameter=parameter)
        if destination.numel:
            self.constants.append(Constant(parameter, destination, value))

    def _apply(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sources: Sequence[RecordingTensor]) -> Any:
        """Runs the operation in index space. Any operation but a view makes its tensors fallbacks."""
        origin = frozenset[str]().union(*(source.origin for source in sources))
        if not _is_view(func) or any(source.parts for source in sources):
            self.fallback |= origin
        try:
            spaces = _mapped(args, _index_space)
            result = func(*spaces, **_mapped(kwargs, _index_space))
        except (NotImplementedError, RuntimeError) as error:
            # Meta tensors have no values, which operations such as item() need.
            self.fallback |= origin
            raise _Unrecordable(str(error)) from error
        return _mapped(result, lambda space: RecordingTensor(space, origin, self))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


class _WriteObserver(TorchDispatchMode):
    """Executes everything and records which slices of parameters are written."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        self.writes: dict[FallbackWrite, None] = {}
        self._parameters = parameters

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            place = self._parameters.locate(args[0])
            if place is not None and args[0].numel():
                self.writes[FallbackWrite(*place)] = None
        return func(*args, **(kwargs if kwargs is not None else {}))


def _observe_fallback(
    model: EngineModel, parameters: Parameters, published: PublishedTensors, names: Sequence[str]
) -> tuple[FallbackWrite, ...]:
    if not names:
        return ()
    before = parameters.fingerprint()
    observer = _WriteObserver(parameters)
    with observer:
        model.load_weights([(name, published.gathered(name)) for name in names])
    if Parameters(model).fingerprint() != before:
        raise UnsupportedModel(
            f"load_weights replaces parameters while it loads {', '.join(names[:5])}", tensors=",".join(names[:5])
        )
    return tuple(observer.writes)


def check_plan(plan: CopyPlan, parameters: Parameters, layout: Layout) -> None:
    """Raises WeightsCorrupt naming a parameter not written exactly once, BadHandle if a tensor would lose precision."""
    for piece in plan.pieces:
        published, held = layout[piece.name][1], parameters.dtype(piece.parameter)
        if torch.promote_types(published, held) != held:
            raise BadHandle(
                f"{piece.name} is published as {published}, but the engine holds {piece.parameter} as {held}; publish it as {held}",
                tensor=piece.name,
            )
    check_coverage(plan, parameters.numels())


def _tensors(*values: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments, which may be nested. As `_mapped`, much faster than torch's trees."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(*value)
        elif isinstance(value, dict):
            yield from _tensors(*value.values())


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same arguments or results with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_mapped(each, change) for each in value])
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    return value


def _index_space(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.index_space if isinstance(tensor, RecordingTensor) else tensor


def published_layout(config: NodeConfig) -> Layout:
    """The checkpoint's tensors in the engine's dtype, named and cut as by `weights.export.checkpoint_shards`.

    Raises UnsupportedModel for an unknown model, InvalidArgument for a damaged config.json.
    """
    shape = read_model(read_json_object(config.model.path / "config.json", field="model.path")).shape
    names, dtype = find_family(shape.architecture).checkpoint, getattr(torch, config.rollout.dtype)
    tensors: dict[str, tuple[int, ...]] = {}
    for name, sizes in shape.parameters().items():
        tensors |= _experts(name, sizes, names) or {names.tensor(name): sizes}
    constants = {names.tensor(name): (sizes, torch.float32) for name, sizes in shape.constants().items()}
    return {name: (sizes, dtype) for name, sizes in tensors.items()} | constants


def _experts(name: str, sizes: tuple[int, ...], names: CheckpointNames) -> dict[str, tuple[int, ...]]:
    """The tensors of every expert in a fused parameter; empty for any other."""
    parts = names.fused(name)
    if not parts:
        return {}
    num_experts, rows, columns = sizes
    return {names.expert(name, index, part): (rows // len(parts), columns) for index in range(num_experts) for part in parts}
