"""Bytes that cross nodes in an optimizer step, by layout, and how long a network takes for them. Pure.

Source: 2 (R - 1) / R of the bytes pass each node in a ring all-reduce over R nodes, (R - 1) / R in an all-gather or a reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasuki.planner.layout import Layout
from tasuki.planner.trainer_bytes import gradient_bytes
from tasuki.wire.errors import InvalidArgument

_FLOAT32_BYTES, _HALF_BYTES = 4, 2
_GBIT = 10**9 / 8


@dataclass(frozen=True, slots=True)
class Traffic:
    """In each direction through the network cards of one node."""

    layout: str
    num_bytes: int
    per: str
    """"step" or "micro-batch"."""
    is_available: bool
    """Whether a fleet can be told to do it. The first is what it does as it is configured; the others are there to compare."""

    def seconds(self, network_gbit: float) -> float:
        """At `network_gbit` 10^9 bits a second, of all cards of a node together; an estimate without latency and overlap."""
        return self.num_bytes / (network_gbit * _GBIT)


def node_traffic(layout: Layout, *, num_nodes: int) -> Sequence[Traffic]:
    """What a fleet of `num_nodes` such nodes sends: none for one. Raises InvalidArgument for no node."""
    if num_nodes < 1:
        raise InvalidArgument("nodes", f"{num_nodes} must be at least 1")
    if num_nodes == 1:
        return ()
    gradients = gradient_bytes(layout) * layout.num_ranks
    crossing = (num_nodes - 1) / num_nodes
    gathered = layout.model.num_parameters * layout.compute_bytes
    reduced = gradients * _FLOAT32_BYTES // layout.param_bytes
    rows = [Traffic("HSDP", round(2 * crossing * gradients), "step", True)]
    if layout.lora_rank is None and layout.param_bytes > _HALF_BYTES:
        halved = round(2 * crossing * gradients * _HALF_BYTES / layout.param_bytes)
        rows.append(Traffic('HSDP with trainer.param_dtype = "bfloat16"', halved, "step", True))
    rows.append(Traffic("FSDP over all nodes", round(crossing * (2 * gathered + reduced)), "micro-batch", False))
    return rows


def check_rate(network_gbit: float | None, *, num_nodes: int) -> None:
    """Raises InvalidArgument for a rate that is none, and for one between nodes of which there is only one."""
    if network_gbit is not None and num_nodes == 1:
        raise InvalidArgument("network-gbit", "is the rate between nodes, and this plan has one node: give --nodes N, too")
    if network_gbit is not None and not (math.isfinite(network_gbit) and network_gbit > 0):
        raise InvalidArgument("network-gbit", f"must be a rate above 0 in 10^9 bits a second, not {network_gbit:g}")
