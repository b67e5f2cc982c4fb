"""Ulysses sequence parallelism: ranks split the tokens of a micro-batch and, inside attention, its heads.

Each rank computes everything but attention on its part of the tokens. Attention sees all tokens, for part of the heads.

Shape suffixes: T tokens of the micro-batch, t this rank's, H query heads, K key heads, h and k those of one rank, D head size,
R ranks that share, N completion tokens, n this rank's.
Source: DeepSpeed Ulysses (arXiv:2309.14509).
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tasuki.trainer.data.micro_batch import SequencePart


class SequenceGroup:
    """The ranks that share a micro-batch: neighbours, in the order of their tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.part = SequencePart(group.rank(), group.size())

    @classmethod
    def of(cls, mesh: DeviceMesh, *, size: int, timeout_s: float) -> "SequenceGroup | None":
        """This rank's group of `size` ranks, which must divide the mesh; None for 1. Collective.

        A collective that waits longer than `timeout_s` for a peer fails.
        """
        if size == 1:
            return None
        if size == mesh.size():
            return cls(mesh.get_group("dp"))
        timeout, firsts = timedelta(seconds=timeout_s), range(0, mesh.size(), size)
        groups = [dist.new_group(list(range(first, first + size)), timeout=timeout) for first in firsts]
        return cls(cast(dist.ProcessGroup, groups[mesh.get_local_rank() // size]))

    def to_heads(self, q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From all heads of this rank's tokens to this rank's heads of all tokens: [T, h, D], [T, k, D] and [T, k, D].

        If there are fewer key heads than ranks, they are repeated and their gradients summed.
        """
        num_ranks = self.part.num_parts
        repeats = max(1, num_ranks // k_tKD.shape[1])
        sent = [q_tHD, *(x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k_tKD, v_tKD))]
        parts_tRhD = [x.unflatten(1, (num_ranks, -1)) for x in sent]
        together_RthD = torch.cat(parts_tRhD, dim=2).transpose(0, 1).contiguous()
        together_ThD = _Exchange.apply(together_RthD, self._group).flatten(0, 1)
        q, k, v = together_ThD.split([part.shape[2] for part in parts_tRhD], dim=1)
        return q, k, v

    def to_tokens(self, out_ThD: Tensor) -> Tensor:
        """From this rank's heads of all tokens to all heads of this rank's tokens, [t, H, D]."""
        out_RthD = _Exchange.apply(out_ThD.unflatten(0, (self.part.num_parts, -1)).contiguous(), self._group)
        return out_RthD.transpose(0, 1).flatten(1, 2)

    def gather(self, scores_n: Sequence[Tensor], *, counts: Sequence[int]) -> list[Tensor]:
        """Concatenates each rank's vectors to those of all completion tokens, [N]. counts: of every rank.

        Every rank then computes the same; its gradient covers its part, so that the gradients of all ranks sum to the whole.
        """
        columns_nC = torch.stack(list(scores_n), dim=1)
        return list(_Gather.apply(columns_nC, self._group, tuple(counts)).unbind(1))


class _Exchange(torch.autograd.Function):
    """[R, ...]: sends the r-th part to rank r and replaces it with what that rank sends. Its own inverse."""

    @staticmethod
    def forward(ctx: Any, x_R: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x_R, group)

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchanged(grad_R.contiguous(), ctx.group), None


class _Gather(torch.autograd.Function):
    """[n, C] -> [N, C]."""

    @staticmethod
    def forward(ctx: Any, columns_nC: Tensor, group: dist.ProcessGroup, counts: tuple[int, ...]) -> Tensor:
        ctx.rank, ctx.counts = group.rank(), counts
        longest, num_columns = max(counts), columns_nC.shape[1]
        if not longest:
            return columns_nC.new_empty(0, num_columns)
        # Padded to one length, as the collective requires.
        sent = columns_nC.new_zeros(longest, num_columns)
        sent[: len(columns_nC)] = columns_nC
        received = sent.new_empty(len(counts) * longest, num_columns)
        dist.all_gather_into_tensor(received, sent, group=group)
        return torch.cat([part[:count] for part, count in zip(received.split(longest), counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad_NC: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_NC.split(ctx.counts)[ctx.rank], None, None


def _exchanged(x_R: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(x_R)
    dist.all_to_all_single(received, x_R, group=group)
    return received
