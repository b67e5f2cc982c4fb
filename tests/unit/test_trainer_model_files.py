"""Model folders that the trainer accepts, its errors for others, and the stop tokens that any of their files names."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasuki.models.known import read_model_shape
from tasuki.models.stored_tensors import check_stored
from tasuki.models.tokenizer import read_stop_token_ids
from tasuki.trainer.durable.model_folder import ARCHITECTURES, load_shards, read_model_config
from tasuki.weights.export import Shard
from tasuki.wire.errors import InvalidArgument, UnsupportedModel
from tests.models import EOS, char_tokenizer, make_model, save_checkpoint
from tests.quantized import quantize_experts, quantize_matrices
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


def test_all_that_any_file_names_are_stop_tokens(tmp_path: Path) -> None:
    char_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": 8}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 999]}))
    assert read_stop_token_ids(tmp_path, vocab_size=131) == (EOS, 7, 8, 9)
    assert read_stop_token_ids(tmp_path, vocab_size=2**50)[:2] == (EOS, 7)  # without a list of them


@pytest.mark.parametrize("value", ["5", 2.0, True, [[2]], [3, None], {"a": 1}])
def test_what_is_no_token_id_is_refused_by_its_file(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(InvalidArgument, match=r"generation_config.json: eos_token_id has"):
        read_stop_token_ids(tmp_path, vocab_size=131)


def test_a_byte_order_mark_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf{}")
    with pytest.raises(InvalidArgument, match="config.json begins with a byte-order mark"):
        read_stop_token_ids(tmp_path, vocab_size=131)
