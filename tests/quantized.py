"""Model folders with quantized weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def quantize_experts(folder: Path) -> dict[str, torch.Tensor]:
    """Replaces the experts of a gpt-oss folder by random ones in MXFP4. Returns all tensors as transformers dequantizes them."""
    stored = load_file(folder / "model.safetensors")
    generator, whole = torch.Generator().manual_seed(0), dict(stored)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num, rows, columns = stored.pop(name).shape
        blocks = torch.randint(256, (num, columns, rows // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return whole


def quantize_matrices(folder: Path) -> dict[str, torch.Tensor]:
    """Replaces the matrices of all layers but routers by FP8. Returns all tensors as they are dequantized."""
    stored = load_file(folder / "model.safetensors")
    whole = dict(stored)
    for name in [name for name in stored if name.endswith("_proj.weight") or "_proj_with" in name]:
        rows, columns = stored[name].shape
        scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=torch.Generator().manual_seed(rows)) + 0.01
        factors = torch.kron(scales, torch.ones(128, 128))[:rows, :columns]
        stored[name] = (stored[name] / factors).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scales
        whole[name] = stored[name].float() * factors
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return whole
