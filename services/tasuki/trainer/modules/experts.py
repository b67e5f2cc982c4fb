"""Expert parallelism: each rank keeps its part of a layer's experts whole, and tokens travel to the ranks of their experts and back.

The parameters are the same shards as under FSDP2, which neither gathers them nor reduces their gradients: those of all ranks' tokens
arise where the expert is.

Shape suffixes: T tokens of this rank, K chosen experts of each, H hidden, I inside an expert, E experts, e those of one rank, R ranks,
S = T K rows that this rank sends, X rows that it receives.
Source: GShard (arXiv:2006.16668), with as many rows as there are, as in MegaBlocks (arXiv:2211.15841).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import grouped_mm

from tasuki.trainer.modules.pointwise import clamped_gate

_EXPERTS = (
    "MixtralExperts",
    "Qwen3MoeExperts",
    "Qwen3_5MoeExperts",
    "Qwen3NextExperts",
    "DeepseekV2Experts",
    "GptOssExperts",
    # Before and from transformers 5.19 on.
    *(f"{family}{kind}" for family in ("Glm4Moe", "Glm4MoeLite", "DeepseekV3") for kind in ("NaiveMoe", "Experts")),
)


class _Routes(NamedTuple):
    num_sent: list[int]
    """Rows to each rank."""
    num_received: list[int]
    """Rows from each rank."""
    order_X: Tensor
    """int64: received rows by expert."""
    ends_e: Tensor
    """int32: where each expert's rows end."""


class GroupedExperts(nn.Module):
    """Computes like transformers' experts, all of a layer in one grouped product, possibly with an adapter for each expert.

    Adapters: `NAME_lora_A` [E, rank, in] and `NAME_lora_B` [E, out, rank] beside a matrix NAME [E, out, in]; see lora/adapters.py.
    """

    scaling: float | None = None
    """Factor of the adapters' output; None without any."""
    is_adapted = True
    """Whether adapters, if there are any, are on."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        given: Any = experts
        self.num_experts: int = given.gate_up_proj.shape[0]
        self._is_biased: bool = given.has_bias
        """Whether they are gpt-oss's: with biases, and matrices [e, inputs, outputs]."""
        self._gated: Callable[[Tensor], Tensor] = clamped_gate(given) if given.has_bias else partial(_gate, given.act_fn)
        for name, param in experts.named_parameters():
            self.add(name, param)

    def add(self, name: str, param: Tensor) -> None:
        """Registers a parameter of all experts."""
        self.register_parameter(name, nn.Parameter(param.detach()))

    def forward(self, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, H]."""
        chosen_S, num_chosen = chosen_TK.flatten(), chosen_TK.shape[1]
        order_S = chosen_S.argsort(stable=True)
        inverse_S = _inverse(order_S)
        # Rows have no names here: they would live longer than they are needed.
        weighted_SH = self._computed(_Copied.apply(hidden_TH, order_S, inverse_S, num_chosen), chosen_S) * weights_TK.flatten()[
            order_S
        ].unsqueeze(-1)
        return _Summed.apply(weighted_SH, order_S, inverse_S, num_chosen).to(hidden_TH.dtype)

    def _computed(self, rows: Tensor, chosen_S: Tensor) -> Tensor:
        """[S, H]: what its expert makes of each row. rows: sorted by expert."""
        return self._own(rows, self._counts(chosen_S).cumsum(dim=0).to(torch.int32))

    def _counts(self, chosen_S: Tensor) -> Tensor:
        """[E] int64: rows of each expert."""
        return chosen_S.new_zeros(self.num_experts).index_add_(0, chosen_S, torch.ones_like(chosen_S))

    def _own(self, rows_XH: Tensor, ends_e: Tensor) -> Tensor:
        """[X, H]: what this rank's experts make of their rows."""
        # Weights are made local where they are used: autograd then adds up the gradient of one before it computes the other's.
        return self._linear("down_proj", self._gated(self._linear("gate_up_proj", rows_XH, ends_e)), ends_e)

    def _linear(self, name: str, rows_XI: Tensor, ends_e: Tensor) -> Tensor:
        weight = self._local(name)
        if self._is_biased:
            bias_eO = self._local(f"{name}_bias").to(rows_XI.dtype)
            counts_e = ends_e.diff(prepend=ends_e.new_zeros(1))
            bias_XO = bias_eO.repeat_interleave(counts_e, dim=0, output_size=len(rows_XI))
            return _GroupedLinear.apply(rows_XI, weight.transpose(-2, -1), ends_e) + bias_XO
        out_XO = _GroupedLinear.apply(rows_XI, weight, ends_e)
        if self.scaling is None or not self.is_adapted:
            return out_XO
        inner_XR = _GroupedLinear.apply(rows_XI, self._local(f"{name}_lora_A"), ends_e)
        return out_XO + self.scaling * _GroupedLinear.apply(inner_XR, self._local(f"{name}_lora_B"), ends_e)

    def _local(self, name: str) -> Tensor:
        """A parameter as FSDP2 has gathered it, or this rank's part of one that it does not gather."""
        param = getattr(self, name)
        return param.to_local() if isinstance(param, DTensor) else param


class ParallelExperts(GroupedExperts):
    """The same over ranks. Parameters are DTensors, split by expert. Passes are collective."""

    def __init__(self, experts: nn.Module, mesh: DeviceMesh) -> None:
        """experts: as many as the ranks of `mesh` can share evenly; on the meta device they take no memory."""
        self._mesh, self._num_ranks = mesh, mesh.size()
        super().__init__(experts)
        self._group = mesh.get_group("dp")
        assert self.num_experts % self._num_ranks == 0, "the planner refuses others"

    def add(self, name: str, param: Tensor) -> None:
        super().add(name, distribute_tensor(param.detach(), self._mesh, [Shard(0)], src_data_rank=None))

    def _computed(self, rows: Tensor, chosen_S: Tensor) -> Tensor:
        """[S, H]: the same rows, computed by the ranks of their experts."""
        routes = self._routes(chosen_S)
        order_X, inverse_X = routes.order_X, _inverse(routes.order_X)
        rows = _Exchange.apply(rows, self._group, routes.num_sent, routes.num_received)
        rows = self._own(_Copied.apply(rows, order_X, inverse_X, 1), routes.ends_e)
        rows = _Copied.apply(rows, inverse_X, order_X, 1)
        return _Exchange.apply(rows, self._group, routes.num_received, routes.num_sent)

    def _routes(self, chosen_S: Tensor) -> _Routes:
        """Exchanges the numbers of rows."""
        counts_E = self._counts(chosen_S)
        counts_Re = counts_E.view(self._num_ranks, -1)
        received_Re = torch.empty_like(counts_Re)
        dist.all_to_all_single(received_Re, counts_Re, group=self._group)
        # The one wait for the device: memory and collectives need the sizes.
        num_sent, num_received = torch.stack([counts_Re.sum(dim=1), received_Re.sum(dim=1)]).tolist()
        experts_Re = torch.arange(counts_Re.shape[1], device=chosen_S.device).expand_as(counts_Re)
        experts_X = experts_Re.flatten().repeat_interleave(received_Re.flatten(), output_size=sum(num_received))
        ends_e = received_Re.sum(dim=0).cumsum(dim=0).to(torch.int32)
        return _Routes(num_sent, num_received, experts_X.argsort(stable=True), ends_e)


def replace_experts(causal_lm: nn.Module, mesh: DeviceMesh | None) -> None:
    """Replaces the experts by ParallelExperts over `mesh`, or else by GroupedExperts. Parameters keep their names and order."""
    for parent in list(causal_lm.modules()):
        for name, module in list(parent.named_children()):
            if type(module).__name__ in _EXPERTS:
                setattr(parent, name, GroupedExperts(module) if mesh is None else ParallelExperts(module, mesh))


def ungathered_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that belong to no FSDP2 group."""
    return (param for each in module.modules() if isinstance(each, ParallelExperts) for param in each.parameters())


def _gate(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class _Exchange(torch.autograd.Function):
    """[sum(num_sent), H] -> [sum(num_received), H]: sends the r-th run of rows to rank r, and receives its run for this rank."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, num_sent: Sequence[int], num_received: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.num_sent, ctx.num_received = group, num_sent, num_received
        return _exchanged(rows, group, num_sent, num_received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchanged(grad.contiguous(), ctx.group, ctx.num_received, ctx.num_sent), None, None, None


def _exchanged(rows: Tensor, group: dist.ProcessGroup, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
    received = rows.new_empty(sum(num_received), rows.shape[1])
    dist.all_to_all_single(received, rows, list(num_received), list(num_sent), group=group)
    return received


class _Copied(torch.autograd.Function):
    """[N, H] -> [N num_copies, H]: copies of each row, then put in another order. Both passes gather."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, num_copies: int) -> Tensor:
        """order: positions of the copies before. inverse: undoes it."""
        ctx.save_for_backward(inverse)
        ctx.num_copies = num_copies
        return _copied(rows, order, num_copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _summed(grad, ctx.saved_tensors[0], ctx.num_copies), None, None, None


class _Summed(torch.autograd.Function):
    """[N num_copies, H] -> [N, H]: sums the copies that `_Copied` makes with the same arguments."""

    @staticmethod
    def forward(ctx: Any, copies: Tensor, order: Tensor, inverse: Tensor, num_copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.num_copies = num_copies
        return _summed(copies, inverse, num_copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _copied(grad, ctx.saved_tensors[0], ctx.num_copies), None, None, None


def _copied(rows: Tensor, order: Tensor, num_copies: int) -> Tensor:
    return rows[order if num_copies == 1 else order // num_copies]


def _summed(copies: Tensor, inverse: Tensor, num_copies: int) -> Tensor:
    copies = copies[inverse]
    return copies if num_copies == 1 else copies.unflatten(0, (-1, num_copies)).sum(dim=1)


class _GroupedLinear(torch.autograd.Function):
    """Each expert's linear layer on its rows, in their dtype. Weights are cast again in backward, so no cast copy is kept.

    The gradient of a transposed weight is transposed, too: contiguous for the parameter itself.
    """

    @staticmethod
    def forward(ctx: Any, rows_XI: Tensor, weight_eOI: Tensor, ends_e: Tensor) -> Tensor:
        ctx.save_for_backward(rows_XI, weight_eOI, ends_e)
        if not len(rows_XI):
            return rows_XI.new_empty(0, weight_eOI.shape[1])
        return grouped_mm(rows_XI, weight_eOI.to(rows_XI.dtype).transpose(-2, -1), offs=ends_e)

    @staticmethod
    def backward(ctx: Any, grad_XO: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_XI, weight_eOI, ends_e = ctx.saved_tensors
        has_gradient = ctx.needs_input_grad[1]
        if not len(rows_XI):
            return torch.empty_like(rows_XI), torch.zeros_like(weight_eOI) if has_gradient else None, None
        grad_XO = grad_XO.contiguous()
        grad_XI = grouped_mm(grad_XO, weight_eOI.to(grad_XO.dtype), offs=ends_e)
        if not has_gradient:
            return grad_XI, None, None
        if weight_eOI.stride(-1) == 1:
            grad_eOI = grouped_mm(grad_XO.t(), rows_XI, offs=ends_e)
        else:
            grad_eOI = grouped_mm(rows_XI.t(), grad_XO, offs=ends_e).transpose(-2, -1)
        return grad_XI, grad_eOI.to(weight_eOI.dtype), None
