"""An adapter in an engine rank's model, without an engine: received from a trainer, and loaded by SGLang for comparison."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.config.trainer_schema import LoraConfig
from tasuki.v1 import weights_pb2
from tasuki.weights.plan import Slice


@dataclass(frozen=True)
class Adapter:
    """folder: in PEFT's format, with the adapter that is published."""

    folder: Path
    lora: LoraConfig


def receive_adapter(
    model: Any, args: Any, adapter: Adapter, published: weights_pb2.PublishedWeights, *, tp_rank: int
) -> tuple[list[str], tuple[tuple[str, Slice, int], ...]]:
    """Returns the buffers that differ from those SGLang fills from the folder, and the checksums of the received tensors."""
    import torch
    from safetensors.torch import load_file
    from sglang.srt.lora.lora_registry import LoRARef

    from tasuki.rollout.receive import WeightReceiver
    from tasuki.rollout.sglang.adapter import serve_adapter

    manager = _manager(model, args, adapter.lora, tp_rank=tp_rank)
    ours = serve_adapter(manager, adapter.lora, tp_rank=tp_rank)
    for _, buffer in ours.named_parameters():
        buffer.fill_(float("nan"))
    receiver = WeightReceiver(ours)
    receiver.record_ahead(ours.layout(torch.bfloat16))
    recorded = receiver._recorded
    received = receiver.receive(published, import_timeout_s=10)
    assert receiver._recorded is recorded
    assert received.fallback_names == ()
    tensors, settings = load_file(adapter.folder / "adapter_model.safetensors"), adapter.folder / "adapter_config.json"
    ref = LoRARef(lora_id="theirs", lora_name="theirs", lora_path="theirs", pinned=False)
    result = manager.load_lora_adapter_from_tensors(ref, tensors, json.loads(settings.read_text()))
    assert result.success, result.error_message
    manager.fetch_new_loras({"policy", "theirs"})
    pool, slot = manager.memory_pool, manager.memory_pool.get_buffer_id("theirs")
    different: list[str] = []
    for layer, modules in enumerate(manager.lora_modules):
        for name in modules:
            for part, buffers in (("A", pool.A_buffer), ("B", pool.B_buffer)):
                theirs = buffers[name.rpartition(".")[2]][layer][slot]
                mine = dict(ours.named_parameters())[f"{name}.lora_{part}"]
                assert theirs.any(), f"nothing is compared in {name}.lora_{part}"
                different += [] if torch.equal(mine, theirs) else [f"{name}.lora_{part}"]
    return different, received.checksums


def _manager(model: Any, args: Any, lora: LoraConfig, *, tp_rank: int) -> Any:
    import torch
    from sglang.srt.configs.load_config import LoadConfig

    from tasuki.rollout.arguments import LORA_BACKEND
    from tasuki.rollout.sglang.adapter import UnpinnedLora
    from tasuki.rollout.sglang.dense_lora import install_dense_lora

    install_dense_lora(lora)
    return UnpinnedLora(
        base_model=model,
        base_hf_config=model.config,
        max_loras_per_batch=2,
        load_config=LoadConfig(),
        dtype=torch.bfloat16,
        server_args=args,
        lora_backend=LORA_BACKEND,
        tp_size=args.tp_size,
        tp_rank=tp_rank,
        max_lora_rank=lora.rank,
        target_modules=set(lora.target_modules),
    )
