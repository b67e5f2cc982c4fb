"""Cases of the sync benchmarks, as written on the command line."""

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass

from tools.bench.sync_shapes import QWEN

METAVAR = "MODEL:RANKS:TP[xENGINES]"
_CASE = re.compile(r"(?P<model>[^:]+):(?P<num_ranks>[1-9][0-9]?):(?P<tp_size>[1-9][0-9]?)(x(?P<num_engines>[1-9][0-9]?))?")


@dataclass(frozen=True, slots=True)
class Case:
    """Trainer ranks and engine ranks are both on the first GPUs, one each."""

    model: str
    num_ranks: int
    tp_size: int
    num_engines: int = 1

    @classmethod
    def of(cls, text: str) -> "Case":
        """Reads "7b:4:4" or "7b:4:1x4". Raises ArgumentTypeError."""
        parts = _CASE.fullmatch(text)
        if parts is None:
            raise ArgumentTypeError(f"{text!r} is not {METAVAR} with numbers of 1 to 99")
        shape, tp_size = QWEN.get(parts["model"]), int(parts["tp_size"])
        if shape is None:
            raise ArgumentTypeError(f"{text!r}: the models are {', '.join(QWEN)}")
        if shape.num_kv_heads % tp_size:
            raise ArgumentTypeError(
                f"{text!r}: {shape.num_kv_heads} heads of keys cannot be on {tp_size} tensor-parallel ranks"
            )
        return cls(parts["model"], int(parts["num_ranks"]), tp_size, int(parts["num_engines"] or 1))

    @classmethod
    def beside_each_other(cls, text: str) -> "Case":
        """Reads a case in which every GPU has a trainer rank and an engine rank. Raises ArgumentTypeError."""
        case = cls.of(text)
        if case.num_ranks != case.tp_size * case.num_engines:
            raise ArgumentTypeError(f"{text!r}: here the engines have as many ranks as the trainer, as in 7b:2:2 and 7b:4:1x4")
        names = (name for name, (rows, *_) in QWEN[case.model].checkpoint().items() if rows % case.num_ranks)
        if name := next(names, None):
            raise ArgumentTypeError(
                f"{text!r}: NCCL gathers as many rows from each trainer rank, and {name}'s cannot be shared out so"
            )
        return case

    @property
    def num_gpus(self) -> int:
        return max(self.num_ranks, self.tp_size * self.num_engines)

    def __str__(self) -> str:
        engines = "" if self.num_engines == 1 else f"x{self.num_engines}"
        return f"{self.model}:{self.num_ranks}:{self.tp_size}{engines}"
