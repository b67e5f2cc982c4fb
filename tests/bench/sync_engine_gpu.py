"""A sync of weights into a running SGLang engine on GPUs: `python -m tests.bench.sync_engine_gpu [--model 7b] [--ranks 1] [--tp 1]`.

Trainer ranks are processes as in sync_gpu.py; the engine is SGLang's with our memory, started and commanded as the service does it, but
for the RPC in front. The clock runs from the front's call to its answer: handles checked, all ranks' copies made, summed and waited for,
all checksums compared. "record" (is there a plan?), "copy" (with sums, and whether a parameter has moved) and "verify" are parts of it, of
the slowest rank. Every round has new weights; the first one, with import, recording and compilation, is told apart. Writes
sync_engine_gpu.json and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from tasuki.v1 import weights_pb2
from tests.bench.sync_gpu import MODULE, NUM_ROUNDS
from tests.bench.sync_ranks import REPOSITORY, Ranks, published_weights
from tests.bench.sync_shapes import QWEN, QwenShape

SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "enable_memory_saver": True,
    "mem_fraction_static": 0.4,
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
    "log_level": "warning",
}


def model_config(shape: QwenShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_config(model: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config(QWEN[model])))
    return folder


def start_engine(
    arguments: dict[str, Any], *, tp_size: int, scheduler: Callable[..., None] | None = None, loaders: Sequence[str] = ()
) -> Any:
    """scheduler: runs in every rank in the place of the service's own; loaders: more names that SGLang may call as weight loaders."""
    from contextlib import nullcontext

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    from tasuki.rollout.rank_commands import COMMAND_LOADER, command_tensors
    from tasuki.rollout.scheduler import run_scheduler

    class NoSaver:
        configure_subprocess = staticmethod(nullcontext)

    class ArenaEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler if scheduler is None else scheduler)
        num_ranks = tp_size

        async def run_on_ranks(self, command: bytes) -> None:
            payload = MultiprocessingSerializer.serialize(command_tensors(command))
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[payload] * tp_size, load_format=COMMAND_LOADER, flush_cache=False
            )
            success, message = await self.tokenizer_manager.update_weights_from_tensor(request)
            assert success, message

    TorchMemorySaverAdapter.create = staticmethod(lambda enable: NoSaver())
    return ArenaEngine(**arguments, tp_size=tp_size, custom_weight_loader=[COMMAND_LOADER, *loaders])


def run(model: str, num_ranks: int, tp_size: int, folder: Path) -> dict[str, Any]:
    from tasuki.rollout.rank_calls import RankCalls
    from tasuki.rollout.sync import WeightSync

    asyncio.set_event_loop(asyncio.new_event_loop())
    engine = start_engine({"model_path": str(write_config(model, folder / "model")), **SETTINGS}, tp_size=tp_size)

    def wait_for(work: Coroutine[Any, Any, Any]) -> Any:
        return engine.loop.run_until_complete(work)

    async def make_sync() -> WeightSync:
        return WeightSync(RankCalls(engine, socket_dir=folder), socket_dir=folder)

    sync = wait_for(make_sync())
    trainers = Ranks(MODULE, [["--trainer", str(rank), str(num_ranks), model, str(folder)] for rank in range(num_ranks)])

    async def one_sync(weights: weights_pb2.PublishedWeights) -> Any:
        return await sync.run(weights, await sync.prepare(weights), timeout_s=120)

    def one_round(version: int) -> dict[str, Any]:
        weights = published_weights(trainers.ask(str(version)), version)
        time.sleep(0.1)  # the scheduler is idle
        start = time.perf_counter()
        report = wait_for(one_sync(weights))
        total_ms = 1e3 * (time.perf_counter() - start)
        assert report.fallback_names == ()
        parts_ms = {name: 1e3 * seconds for name, seconds in report.timings.items()}
        return {"total_ms": total_ms, "parts_ms": parts_ms, "copied_bytes": report.copied_bytes}

    rounds = [one_round(version) for version in range(NUM_ROUNDS + 1)]
    tokens = engine.generate(
        input_ids=[[5, 6, 7]], sampling_params={"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    )
    trainers.close()
    return {
        "case": f"{model}:{num_ranks}:{tp_size}",
        "first": rounds[0],
        "rounds": rounds[1:],
        "tokens": tokens[0]["output_ids"],
    }


def table(result: dict[str, Any]) -> str:
    rounds = result["rounds"]

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ms median, {sorted(values)[-1 - len(values) // 100]:.2f} ms p99"

    lines = [
        f"{result['case']} into SGLang, {len(rounds)} rounds, {rounds[0]['copied_bytes'] / 1e9:.2f} GB copied; tokens {result['tokens']}"
    ]
    lines += [f"  total     {spread([one['total_ms'] for one in rounds])}; first {result['first']['total_ms']:.0f} ms"]
    lines += [f"  part {name}: {spread([one['parts_ms'][name] for one in rounds])}" for name in rounds[0]["parts_ms"]]
    before = [one["total_ms"] - one["parts_ms"]["verify"] for one in rounds]
    lines += [f"  total without the ranks' verify  {spread(before)}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(QWEN), default="7b")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs/bench")
    args = parser.parse_args()
    result = run(args.model, args.ranks, args.tp, Path(tempfile.mkdtemp()))
    print(table(result), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "sync_engine_gpu.json").write_text(json.dumps(result, indent=1))
    os._exit(0)  # the engine's processes end with this one


if __name__ == "__main__":
    main()
