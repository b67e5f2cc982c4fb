"""Names of checkpoint tensors, which transformers 5 renames and fuses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """Names of experts in a checkpoint: `<block>.experts.<index>.<gate>.weight`. All other tensors keep their names.

    transformers has them as `mlp.experts.gate_up_proj` [E, 2 I, H], gate first, and `mlp.experts.down_proj` [E, H, I].
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def tensor(self, parameter: str) -> str:
        """Checkpoint name of a parameter other than an expert's."""
        return parameter.replace(".mlp.", f".{self.block}.")

    def fused(self, parameter: str) -> tuple[str, ...]:
        """Parts of one expert's rows in a fused parameter, in order; empty if the parameter is not fused."""
        _, experts, name = parameter.rpartition(_EXPERTS)
        if not experts:
            return ()
        return {"gate_up_proj": (self.gate, self.up), "down_proj": (self.down,)}.get(name, ())

    def expert(self, parameter: str, index: int, part: str) -> str:
        """Checkpoint name of one part of expert `index`."""
        layer, _, _ = parameter.rpartition(_EXPERTS)
        return f"{layer}.{self.block}.experts.{index}.{part}.weight"


_EXPERTS = ".mlp.experts."
