"""Names of checkpoint tensors, where transformers 5 keeps the same weights under other names and fused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """Where a layer's experts are in a checkpoint: `<block>.experts.<index>.<gate>.weight`. Everything else keeps its name.

    transformers has them as `mlp.experts.gate_up_proj` [E, 2 I, H], gate first, and `mlp.experts.down_proj` [E, H, I].
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def tensor(self, parameter: str) -> str:
        """The checkpoint's name of a parameter that is not of the experts."""
        return parameter.replace(".mlp.", f".{self.block}.")

    def fused(self, parameter: str) -> tuple[str, ...]:
        """The parts of one expert's rows in a fused parameter, in their order; none for a parameter that is not fused."""
        _, experts, name = parameter.rpartition(_EXPERTS)
        if not experts:
            return ()
        return {"gate_up_proj": (self.gate, self.up), "down_proj": (self.down,)}.get(name, ())

    def expert(self, parameter: str, index: int, part: str) -> str:
        """The checkpoint's name of one part of expert `index`."""
        layer, _, _ = parameter.rpartition(_EXPERTS)
        return f"{layer}.{self.block}.experts.{index}.{part}.weight"


_EXPERTS = ".mlp.experts."
