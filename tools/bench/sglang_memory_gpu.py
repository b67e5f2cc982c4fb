"""SGLang's sleep on a GPU with our arenas and with its own torch_memory_saver: `python tools/bench/sglang_memory_gpu.py [--out FOLDER]`.

Each turn is a fresh engine in a separate process, ours and the peer's alternating, with the same settings, Qwen2.5-7B's shapes and random
weights. A release or resume is timed in the front with an idle engine, from the call to the rank's answer: as the service calls it (ours),
and as SGLang's Engine calls it (peer, after freeze_gc). Tokens per second are for 64 prompts of 256 tokens with 256 new tokens each. Before
the last generation both sides restore every parameter from a copy; greedy tokens must then equal those from before. Writes
sglang_memory_gpu.json and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = [str(REPOSITORY / "protos"), str(REPOSITORY / "services"), str(Path(__file__).parent), str(REPOSITORY)]
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
PARAMETERS_LOADER = "sglang_memory_gpu.keep_or_restore"
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "enable_memory_saver": True,
    "mem_fraction_static": 0.8,
    "cuda_graph_max_bs_decode": 64,
    "disable_prefill_cuda_graph": True,
    "random_seed": 1,
    "log_level": "warning",
}
STEPS = (("release", "kv_cache"), ("release", "weights"), ("resume", "weights"), ("resume", "kv_cache"))
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 256, 256
NUM_CYCLES, NUM_LOADS = 7, 5

_copies: dict[str, torch.Tensor] = {}


def keep_or_restore(model: torch.nn.Module, _: object) -> None:
    """Runs in the rank: the first call copies every parameter to the host, later calls write the copies back."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in _copies:
                parameter.copy_(_copies[name])
            else:
                _copies[name] = torch.empty_like(parameter, device="cpu").copy_(parameter)


def tell(**values: Any) -> None:
    print("RESULT " + json.dumps(values), flush=True)


def used_gib() -> float:
    """Returns the GiB in use on the whole GPU, as the driver counts them."""
    import pynvml

    pynvml.nvmlInit()
    return round(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used / 2**30, 2)


Mover = Callable[[str, str], None]
"""Releases or resumes a tag."""


def our_engine(arguments: dict[str, Any]) -> tuple[Any, Mover, Callable[[], Any]]:
    """Starts the engine with our arenas; returns it with functions to move tags and to read its ranks' memory."""
    from contextlib import nullcontext

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    from tasuki.rollout.rank_commands import COMMAND_LOADER, command_tensors
    from tasuki.rollout.rollout import RankCalls
    from tasuki.rollout.sglang.scheduler import run_scheduler
    from tasuki.v1.memory_pb2 import GetUsageRequest
    from tasuki.wire.stages import MemoryTag

    class NoSaver:
        configure_subprocess = staticmethod(nullcontext)

    class ArenaEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)
        num_ranks = 1

        async def run_on_ranks(self, command: bytes) -> None:
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[MultiprocessingSerializer.serialize(command_tensors(command))],
                load_format=COMMAND_LOADER,
                flush_cache=False,
            )
            success, message = await self.tokenizer_manager.update_weights_from_tensor(request)
            assert success, message

    TorchMemorySaverAdapter.create = staticmethod(lambda enable: NoSaver())
    engine = ArenaEngine(**arguments, custom_weight_loader=[COMMAND_LOADER, PARAMETERS_LOADER])

    async def make_memory() -> RankCalls:
        return RankCalls(engine, socket_dir=Path(tempfile.mkdtemp()))

    def wait_for(work: Coroutine[Any, Any, Any]) -> Any:
        return engine.loop.run_until_complete(work)

    memory = wait_for(make_memory())

    def move(step: str, tag: str) -> None:
        wait_for((memory.pause if step == "release" else memory.resume)([MemoryTag(tag)], timeout_s=60))

    return engine, move, lambda: str(wait_for(memory.usage(GetUsageRequest(), timeout_s=10)))


def peers_engine(arguments: dict[str, Any]) -> tuple[Any, Mover, Callable[[], Any]]:
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**arguments, custom_weight_loader=[PARAMETERS_LOADER])
    engine.freeze_gc()

    def move(step: str, tag: str) -> None:
        getattr(engine, f"{step}_memory_occupation")(tags=[tag])

    return engine, move, lambda: ""


def timed_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return round(1e3 * (time.perf_counter() - start), 3)


def turn(side: str, arguments: dict[str, Any]) -> None:
    """Runs one engine from start to end; yields results as they come."""
    before = used_gib()
    started = time.perf_counter()
    engine, move, usage = (our_engine if side == "tasuki" else peers_engine)(arguments)
    tell(start_s=round(time.perf_counter() - started, 1), awake_gib=round(used_gib() - before, 2))
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(0, MODEL["vocab_size"] // 2, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator).tolist()

    def tokens_per_s() -> float:
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
        seconds = timed_ms(lambda: engine.generate(input_ids=prompts, sampling_params=sampling)) / 1e3
        engine.flush_cache()  # no cached prefix may serve the next load
        return round(NUM_PROMPTS * NEW_TOKENS / seconds, 1)

    def greedy() -> list[list[int]]:
        sampling = {"max_new_tokens": 64, "temperature": 0.0, "ignore_eos": True}
        return [answer["output_ids"] for answer in engine.generate(input_ids=prompts[:8], sampling_params=sampling)]

    def parameters() -> None:
        engine.update_weights_from_tensor([("", torch.zeros(1))], load_format=PARAMETERS_LOADER, flush_cache=False)

    tokens_per_s()
    tell(tokens_per_s=[tokens_per_s() for _ in range(NUM_LOADS)])
    expected = greedy()
    parameters()
    times: dict[str, list[float]] = {f"{step} {tag}": [] for step, tag in STEPS}
    asleep = 0.0
    for cycle in range(NUM_CYCLES):
        time.sleep(0.2)  # the scheduler is idle
        for step, tag in STEPS:
            times[f"{step} {tag}"].append(timed_ms(lambda step=step, tag=tag: move(step, tag)))
            if (step, tag) == ("release", "weights"):
                asleep = round(used_gib() - before, 2)
                if cycle == 0:
                    tell(usage_asleep=usage())
    tell(times_ms={name: values[1:] for name, values in times.items()}, asleep_gib=asleep)
    parameters()
    tell(is_greedy_same=greedy() == expected, num_distinct_tokens=len({token for row in expected for token in row}))
    tell(tokens_per_s_after=[tokens_per_s() for _ in range(2)])
    os._exit(0)  # the engine's processes end with this one


def run_turn(side: str, model: str, deadline_s: float) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--turn", side, "--model", model]
    output = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
        output, error = done.stdout, "" if done.returncode == 0 else done.stderr[-3000:]
    except subprocess.TimeoutExpired as expired:
        output, error = (expired.stdout or b"").decode(), "ran past its time"
    result: dict[str, Any] = {"side": side, "error": error}
    for line in output.splitlines():
        if line.startswith("RESULT "):
            result |= json.loads(line.removeprefix("RESULT "))
    return result


def table(turns: list[dict[str, Any]]) -> list[str]:
    names = [f"{step} {tag}" for step, tag in STEPS]
    lines = [f"{'':22s}{''.join(f'{name:>18s}' for name in names)}{'tokens/s':>12s}{'asleep GiB':>12s}   ms: medians"]
    for side in ("tasuki", "torch_memory_saver"):
        mine = [result for result in turns if result["side"] == side and "times_ms" in result]
        if mine:
            medians = [statistics.median(time for result in mine for time in result["times_ms"][name]) for name in names]
            rate = statistics.median(rate for result in mine for rate in result["tokens_per_s"])
            asleep = statistics.median(result["asleep_gib"] for result in mine)
            lines.append(f"{side:22s}{''.join(f'{median:18.1f}' for median in medians)}{rate:12.0f}{asleep:12.2f}")
            lines.append(f"{'':22s}greedy tokens as before: {[result.get('is_greedy_same') for result in mine]}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=900, help="turns that do not fit any more are cut or skipped")
    parser.add_argument("--turn", choices=("tasuki", "torch_memory_saver"))
    parser.add_argument("--model", default="")
    arguments = parser.parse_args()
    from tools.bench.gpus import require_gpus

    require_gpus()
    if arguments.turn is not None:
        asyncio.set_event_loop(asyncio.new_event_loop())
        turn(arguments.turn, {"model_path": arguments.model, **SETTINGS})
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = Path(tempfile.mkdtemp())
    (model / "config.json").write_text(json.dumps(MODEL))
    start, turns = time.monotonic(), list[dict[str, Any]]()
    for index in range(arguments.rounds):
        for side in ("tasuki", "torch_memory_saver")[:: 1 if index % 2 == 0 else -1]:
            left_s = arguments.limit_s - (time.monotonic() - start)
            if left_s < 30:
                continue
            turns.append(run_turn(side, str(model), left_s))
            print(f"{side}: {json.dumps(turns[-1])[:3000]}", flush=True)
            (arguments.out / "sglang_memory_gpu.json").write_text(json.dumps({"settings": SETTINGS, "turns": turns}, indent=1))
    print("\n".join(table(turns)))


# SGLang's processes import this file for PARAMETERS_LOADER and must not start anything.
if __name__ == "__main__":
    sys.path[:0] = SOURCES
    main()
