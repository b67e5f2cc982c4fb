"""Run with SGLANG_USE_CPU_ENGINE=1: writes SGLang's rotary tables for the rope_parameters on standard input.

python tests/integration/engine_rope.py MODEL_FOLDER OUTPUT < table of rope_parameters by name
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import save_file
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

HEAD_DIM, LENGTH = 32, 192


def main(model: str, output: str) -> None:
    # SGLang's layers ask for the arguments of the engine that they are in.
    kinds = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none"}
    set_global_server_args_for_scheduler(ServerArgs(model_path=model, device="cpu", **kinds))
    tables = {
        name: get_rope(HEAD_DIM, HEAD_DIM, LENGTH, rope["rope_theta"], rope_scaling=rope, dtype=torch.float32).cos_sin_cache
        for name, rope in json.load(sys.stdin).items()
    }
    save_file({name: table[:LENGTH].clone() for name, table in tables.items()}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
