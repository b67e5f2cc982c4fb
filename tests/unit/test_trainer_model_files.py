"""Model folders that the trainer accepts, and its errors for others."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasuki.models.families import read_model_shape
from tasuki.models.stored_tensors import check_stored
from tasuki.trainer.backends.fsdp.model import ARCHITECTURES, read_model_config
from tasuki.trainer.durable.model_folder import load_shards
from tasuki.weights.shards import Shard
from tasuki.wire.errors import InvalidArgument, UnsupportedModel
from tests.models import make_model, quantize_experts, quantize_matrices, save_checkpoint
from tests.slices import part_of


def write_config(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_an_unsupported_architecture_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel") as raised:
        read_model_config(write_config(tmp_path, model_type="gpt2", architectures=["GPT2LMHeadModel"]))
    assert all(architecture in raised.value.message for architecture in ARCHITECTURES)


def test_quantized_weights_are_unsupported(tmp_path: Path) -> None:
    folder = write_config(
        tmp_path,
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        quantization_config={"quant_method": "gptq", "bits": 4},
    )
    with pytest.raises(UnsupportedModel, match="quantized"):
        read_model_config(folder)


@pytest.mark.parametrize("block_bytes", [1, 20, 1 << 20])
@pytest.mark.parametrize(("offsets", "sizes"), [((3, 0), (2, 4)), ((0, 1), (5, 3)), ((1, 2), (2, 1)), ((5, 0), (0, 4))])
def test_only_the_slice_of_a_shard_is_read(
    offsets: tuple[int, ...], sizes: tuple[int, ...], block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasuki.trainer.durable.model_folder._BLOCK_BYTES", block_bytes)
    whole = torch.arange(20.0).view(5, 4)
    save_file({"weight": whole.to(torch.bfloat16)}, tmp_path / "model.safetensors")
    shard = Shard("weight", (5, 4), offsets, torch.zeros(sizes))
    load_shards(tmp_path, [shard])
    assert torch.equal(shard.local, part_of(whole, shard.box))


def test_tensors_that_do_not_fit_the_config_are_named(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(5, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"weight has shape \[5, 4\], config.json asks for \[6, 4\]"):
        load_shards(tmp_path, [Shard("weight", (6, 4), (0, 0), torch.zeros(6, 4))])
    with pytest.raises(InvalidArgument, match="lacks tensor bias"):
        load_shards(tmp_path, [Shard("bias", (5,), (0,), torch.zeros(5))])


def test_rows_come_from_the_file_that_the_index_names(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shard = Shard("weight", (2, 2), (1, 0), torch.zeros(1, 2))
    load_shards(tmp_path, [shard])
    assert shard.local.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(("offsets", "sizes"), [((0, 0), (160, 64)), ((100, 3), (60, 40)), ((160, 0), (0, 64))])
def test_fp8_is_read_block_by_block(offsets: tuple[int, ...], sizes: tuple[int, ...], tmp_path: Path) -> None:
    folder = save_checkpoint(make_model("deepseek_v3", seed=1, intermediate_size=160), tmp_path)
    expected = quantize_matrices(folder)
    assert read_model_config(folder).architectures == ["DeepseekV3ForCausalLM"]
    assert check_stored(folder, read_model_shape(folder)).keys() == expected.keys()
    for name, place in (("gate", slice(None)), ("down", slice(None, None, -1))):
        name = f"model.layers.0.mlp.{name}_proj.weight"
        shard = Shard(name, (160, 64)[place], offsets[place], torch.full(sizes[place], 7.0))
        load_shards(folder, [shard])
        assert torch.equal(shard.local, part_of(expected[name], shard.box))


@pytest.mark.parametrize(
    ("offsets", "sizes"), [((0, 0, 0), (5, 64, 192)), ((3, 8, 1), (2, 40, 100)), ((5, 0, 0), (0, 64, 192))]
)
def test_mxfp4_is_read_as_transformers_dequantizes_it(offsets: tuple[int, ...], sizes: tuple[int, ...], tmp_path: Path) -> None:
    folder = save_checkpoint(make_model("gpt_oss", seed=1), tmp_path)
    expected = quantize_experts(folder)
    assert read_model_config(folder).architectures == ["GptOssForCausalLM"]
    assert check_stored(folder, read_model_shape(folder)).keys() == expected.keys()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for dtype in (torch.float32, torch.bfloat16):
        shard = Shard(name, (5, 64, 192), offsets, torch.full(sizes, 7, dtype=dtype))
        load_shards(folder, [shard])
        whole = expected[name][tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        assert torch.equal(shard.local, whole.to(dtype))
