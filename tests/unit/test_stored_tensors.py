"""A model folder that is not what its config.json says is refused from its files' headers, by file and tensor."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasuki.models.config_json import read_json_object
from tasuki.models.folder_files import INDEX_FILE
from tasuki.models.known import find_family, read_model
from tasuki.models.stored_tensors import check_head, check_stored, read_file, read_stored
from tasuki.models.stored_values import check_dtypes
from tasuki.node.model_folder import check_model_folder
from tasuki.planner.presets import MODELS
from tasuki.trainer.durable.model_folder import load_shards
from tasuki.weights.export import Shard, checkpoint_shards
from tasuki.wire.errors import InvalidArgument, PathNotFound, UnsupportedModel
from tests.models import CONFIGS, make_model, save_checkpoint, with_tower
from tests.unit.memory_folder import memory_folder

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
UP, HEAD, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folders() -> Iterator[dict[str, Path]]:
    """Returns whole folders by kind: in one file, in two with an index, and tied."""
    with TemporaryDirectory(dir=memory_folder()) as place:
        single = save_checkpoint(make_model("llama", seed=0), Path(place) / "single")
        sharded, tied = Path(place) / "sharded", save_checkpoint(make_model("llama_tied", seed=0), Path(place) / "tied")
        shutil.copytree(single, sharded)
        tensors = load_file(sharded / "model.safetensors")
        (sharded / "model.safetensors").unlink()
        second = [name for name in tensors if name.startswith("model.layers.1.")]
        parts = dict(zip(SHARDS, (sorted(tensors.keys() - second), second), strict=True))
        for file, names in parts.items():
            save_file({name: tensors[name] for name in names}, sharded / file)
        weight_map = {name: file for file, names in parts.items() for name in names}
        (sharded / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        yield {"single": single, "sharded": sharded, "tied": tied}


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit(file: Path, change: Callable[[dict], object]) -> None:
    table = json.loads(file.read_text())
    change(table)
    file.write_text(json.dumps(table))


def refusal(folder: Path) -> str:
    with pytest.raises((InvalidArgument, PathNotFound)) as refused:
        check_model_folder(folder)
    assert "\n" not in refused.value.message
    return refused.value.message


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_every_family_s_own_folder_is_accepted(kind: str, tmp_path: Path) -> None:
    check_model_folder(save_checkpoint(make_model(kind, seed=0), tmp_path))


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing shard": (lambda folder: (folder / SHARDS[1]).unlink(), [SHARDS[1], "No such file", "layers.1", "again"]),
    "broken link": (
        lambda folder: ((folder / SHARDS[1]).unlink(), (folder / SHARDS[1]).symlink_to("../blobs/1")),
        [SHARDS[1], "check its links"],
    ),
    "failing disk": (
        lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").symlink_to("/proc/self/mem")),
        ["config.json cannot be read: Input/output error"],
    ),
    "LFS pointer": (
        lambda folder: (folder / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        [SHARDS[0], "git lfs pull"],
    ),
    **{
        f"LFS pointer of {name}": (
            lambda folder, name=name: (folder / name).write_text("version https://git-lfs.github.com/spec/v1\n"),
            [name, "git lfs pull"],
        )
        for name in ("config.json", "generation_config.json", INDEX_FILE)
    },
    "web page": (lambda folder: (folder / SHARDS[0]).write_text("<!DOCTYPE html>" * 9), [SHARDS[0], "is no safetensors file"]),
    "empty": (lambda folder: (folder / SHARDS[0]).write_bytes(b""), [SHARDS[0], "cut off"]),
    "cut": (lambda folder: (folder / SHARDS[0]).write_bytes((folder / SHARDS[0]).read_bytes()[:-1]), [SHARDS[0], "cut off"]),
    "cut in its header": (lambda folder: os.truncate(folder / SHARDS[0], 99), [SHARDS[0], "cut off"]),
    "longer": (lambda folder: (folder / SHARDS[0]).open("ab").write(b"\0"), [SHARDS[0], "describes"]),
    "in both": (lambda folder: rewrite(folder / SHARDS[0], lambda each: each.update({UP: torch.zeros(96, 64)})), [*SHARDS, UP]),
    "lost by its file": (lambda folder: rewrite(folder / SHARDS[1], lambda each: each.pop(UP)), [INDEX_FILE, SHARDS[1], UP]),
    "lost by the index": (
        lambda folder: edit(folder / INDEX_FILE, lambda index: index["weight_map"].pop(UP)),
        [SHARDS[1], INDEX_FILE, UP],
    ),
    "in another file": (
        lambda folder: edit(folder / INDEX_FILE, lambda index: index["weight_map"].update({UP: SHARDS[0]})),
        [*SHARDS, UP],
    ),
    "outside": (
        lambda folder: edit(folder / INDEX_FILE, lambda index: index["weight_map"].update({UP: "../x.safetensors"})),
        [INDEX_FILE, "../x.safetensors", UP],
    ),
    "two sets": (
        lambda folder: shutil.copy(folder / SHARDS[0], folder / "model.safetensors"),
        ["model.safetensors", INDEX_FILE, "remove one"],
    ),
    "no index": (lambda folder: (folder / INDEX_FILE).unlink(), [SHARDS[0], INDEX_FILE, "download it"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_or_index_is_named(damage: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["sharded"], tmp_path)
    DAMAGES[damage][0](folder)
    said = refusal(folder)
    assert all(part in said for part in DAMAGES[damage][1]), said


CHANGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], list[str]]] = {
    "missing": (lambda each: each.pop(UP), [UP, "lacks"]),
    "renamed": (lambda each: each.update({"model.layers.1.mlp.w3.weight": each.pop(UP)}), [UP, "mlp.w3.weight", "lacks"]),
    "misshapen": (lambda each: each.update({UP: each[UP].T.contiguous()}), [UP, "[64, 96]", "[96, 64]"]),
    "wider": (lambda each: each.update({UP: each[UP].double()}), [UP, "F64"]),
    "quantized": (lambda each: each.update({UP: each[UP].to(torch.float8_e4m3fn)}), [UP, "F8_E4M3"]),
    "whole numbers": (lambda each: each.update({UP: each[UP].to(torch.int32)}), [UP, "I32"]),
    "additional": (lambda each: each.update({"score.weight": torch.zeros(1, 64)}), ["score.weight", "no layer"]),
    "a bias that config.json denies": (
        lambda each: each.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        ["q_proj.bias", "no layer"],
    ),
    "a layer that config.json denies": (
        lambda each: each.update({UP.replace("1", "2"): each[UP].clone()}),
        ["layers.2", "no layer"],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_config_json_does_not_describe_is_named(change: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["single"], tmp_path)
    rewrite(folder / "model.safetensors", CHANGES[change][0])
    said = refusal(folder)
    assert all(part in said for part in ["model", *CHANGES[change][1]]), said


def test_experts_of_a_layer_in_one_tensor_are_asked_for_one_by_one(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", seed=0)
    folder = save_checkpoint(model, tmp_path / "model")
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    assert "store each expert in tensors of its own, as published models do" in refusal(folder)


def test_experts_that_transformers_has_taken_apart_are_read_as_published_ones(tmp_path: Path) -> None:
    model, loaded = make_model("qwen3_5_moe", seed=0).bfloat16(), list[dict[str, torch.Tensor]]()
    for form in ("published", "saved"):
        folder = save_checkpoint(model, tmp_path / form)
        if form == "saved":
            with_tower(model).save_pretrained(folder)
        is_apart = any(".experts.0." in name for name in read_stored(folder))
        assert is_apart is (form == "saved")
        shape = check_model_folder(folder).shape
        names, shards = find_family(shape.architecture).checkpoint, list[Shard]()
        for name, size in shape.parameters().items():
            shards += checkpoint_shards(name, size, (0,) * len(size), torch.full(size, torch.nan), names=names)
        load_shards(folder, shards)
        loaded.append({shard.name: shard.local for shard in shards})
    assert loaded[0].keys() == loaded[1].keys()
    text = [name for name in loaded[0] if ".visual." not in name]
    assert text and all(loaded[0][name].equal(loaded[1][name]) for name in text)


def retype(file: Path, named: str, dtype: str) -> None:
    """Changes the dtype of tensors whose names contain `named` in the header alone."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + length])
    for name in table:
        if named in name:
            table[name]["dtype"] = dtype
    header = json.dumps(table).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_moe", "qwen3_5", "qwen2_5_vl"])
@pytest.mark.parametrize(("own", "other"), [("BF16", "F16"), ("F16", "BF16")])
def test_values_of_another_dtype_than_the_header_says_are_refused(kind: str, own: str, other: str, tmp_path: Path) -> None:
    folder = save_checkpoint(make_model(kind, seed=0), tmp_path / "model")
    file, dtype = folder / "model.safetensors", {"BF16": torch.bfloat16, "F16": torch.float16}[own]
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    check_model_folder(folder)
    whole = file.read_bytes()
    for named in ("", "layers.0.mlp", "layers.1.self_attn.q_proj.weight"):
        retype(file, named, other)
        said = refusal(folder)
        assert str(file) in said and named in said and f"is {other} by the header, but its values are {own}" in said
        file.write_bytes(whole)


def test_weights_of_any_shape_are_taken_for_their_own_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = (48, 128)
    kinds = {
        "dense": torch.randn(shape),
        "with far values": torch.distributions.StudentT(1.5).sample(shape),
        "with scales of rows": torch.randn(shape) * torch.exp(6 * torch.randn(48, 1)),
        "with scales of values": torch.randn(shape) * torch.exp(2 * torch.randn(shape)),
        "of a few levels": (torch.randn(shape) * 3).round(),
        "of two levels a row": torch.randn(shape).sign() * (0.5 + torch.rand(48, 1)),
        "around one": 1 + 0.1 * torch.randn(shape),
        "sparse": torch.randn(shape) * (torch.rand(shape) < 0.1),
    }
    for number, scale in enumerate(10.0**exponent for exponent in range(-12, 4)):
        for dtype in (torch.float16, torch.bfloat16):
            tensors = {kind: (values * scale).to(dtype).clamp(-60000, 60000) for kind, values in kinds.items()}
            save_file(tensors, tmp_path / f"{number}.safetensors")
            check_dtypes(read_file(tmp_path / f"{number}.safetensors", key="test"), key="test")


@pytest.mark.parametrize("name", ["", "model.\nnorm.weight", "model.norm.\x1b[31mweight", "\u202emodel"])
def test_a_name_that_no_line_can_show_is_refused(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["single"], tmp_path)
    rewrite(folder / "model.safetensors", lambda each: each.update({name: each.pop("model.norm.weight")}))
    assert f"model.safetensors is damaged: it has a tensor with the name {name!r}" in refusal(folder)
    folder = Path(shutil.copytree(folders["sharded"], tmp_path / "sharded"))
    edit(folder / INDEX_FILE, lambda index: index["weight_map"].update({name: SHARDS[0]}))
    assert f"{INDEX_FILE} names {SHARDS[0]} for {name!r}, which is not in it" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool, torch.float8_e5m2])
def test_a_buffer_that_every_reader_computes_may_have_any_dtype(dtype: torch.dtype, folders: dict[str, Path], tmp_path: Path):
    folder = copied(folders["single"], tmp_path)
    ids = {
        "model.position_ids": torch.ones(9).to(dtype),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8).to(dtype),
    }
    rewrite(folder / "model.safetensors", lambda each: each.update(ids))
    check_model_folder(folder)


@pytest.mark.parametrize(
    ("names", "cure"),
    [
        (["consolidated.safetensors"], "only consolidated.safetensors"),
        (["pytorch_model.bin"], "save_pretrained"),
        (["adapter_model.safetensors"], "merge"),
        ([], "has no model.safetensors"),
    ],
)
def test_weights_in_another_form_are_named(names: list[str], cure: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["single"], tmp_path)
    for name in names:
        shutil.copy(folder / "model.safetensors", folder / name)
    (folder / "model.safetensors").unlink()
    assert cure in refusal(folder)


def test_a_second_copy_of_a_tensor_in_another_file_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["single"], tmp_path)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")  # Mistral's, which every reader skips
    check_model_folder(folder)
    shutil.copy(folder / "model.safetensors", folder / "old.safetensors")
    assert "old.safetensors" in refusal(folder)


@pytest.mark.parametrize("kind", ["single", "sharded"])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.bin", "adapter_model.safetensors"])
def test_an_adapter_beside_a_model_is_refused(kind: str, name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders[kind], tmp_path)
    (folder / name).write_bytes(b"{}")
    assert name in (said := refusal(folder)) and "trainer.lora.path" in said


@pytest.mark.parametrize("kind", ["single", "sharded"])
@pytest.mark.parametrize("name", ["hf_quant_config.json", "quant_model_description.json"])
def test_a_file_that_has_the_engine_quantize_is_refused(kind: str, name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders[kind], tmp_path)
    (folder / name).write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert f"{folder / name} has the engine quantize the model" in refusal(folder)


def test_a_tied_model_may_repeat_its_embedding_but_not_have_another_head(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["tied"], tmp_path)
    file = folder / "model.safetensors"
    rewrite(file, lambda each: each.update({HEAD: each[EMBEDDING].clone()}))
    check_model_folder(folder)
    rewrite(file, lambda each: each[HEAD][-1, -1].add_(1))
    assert HEAD in (said := refusal(folder)) and "tie_word_embeddings" in said
    edit(folder / "config.json", lambda config: config.update(tie_word_embeddings=False))
    check_model_folder(folder)


def test_the_trainer_compares_every_byte_of_a_large_head(tmp_path: Path) -> None:
    """The start samples a few blocks; the ranks share the rest."""
    head = torch.ones(40_000, 512, dtype=torch.bfloat16)
    embedding = head.clone()
    head[2000, 3] = 2
    save_file({HEAD: head, EMBEDDING: embedding}, tmp_path / "model.safetensors")
    stored = read_stored(tmp_path)
    check_head(stored, MODELS["qwen2.5-0.5b"], step=2)
    with pytest.raises(InvalidArgument, match="lm_head.weight differs"):
        check_head(stored, MODELS["qwen2.5-0.5b"], first=1, step=2)


def test_a_critic_needs_no_lm_head_and_may_have_a_value_head(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["single"], tmp_path)
    shape = read_model(read_json_object(folder / "config.json", field="test")).shape
    rewrite(folder / "model.safetensors", lambda each: each.update({"value_head.weight": torch.zeros(3, 64)}))
    with pytest.raises(InvalidArgument, match=r"value_head.weight has shape \[3, 64\]"):
        check_stored(folder, shape)
    rewrite(folder / "model.safetensors", lambda each: (each.pop(HEAD), each.update({"value_head.weight": torch.zeros(1, 64)})))
    check_stored(folder, shape, is_critic=True)
    rewrite(folder / "model.safetensors", lambda each: each.update({"value_head.weight": torch.zeros(2, 64)}))
    with pytest.raises(InvalidArgument, match=r"trainer.critic.path: .*value_head.weight has shape \[2, 64\]"):
        check_stored(folder, shape, key="trainer.critic.path", is_critic=True)


@pytest.mark.parametrize("model_type", ["helium", "ministral3", "ernie4_5", "qwen2", None, 3])
def test_a_model_type_of_another_class_is_refused_by_key(model_type: object, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["single"], tmp_path)
    edit(folder / "config.json", lambda config: config.update(model_type=model_type))
    with pytest.raises(UnsupportedModel) as refused:
        check_model_folder(folder)
    assert refused.value.metadata["field"] == "model_type"
    edit(folder / "config.json", lambda config: config.pop("model_type"))
    assert "model_type" in refusal(folder)


def trained_from(folder: Path) -> dict[str, torch.Tensor]:
    """What the trainer loads, by name."""
    shape = read_model(read_json_object(folder / "config.json", field="test")).shape
    shards = [Shard(name, size, (0,) * len(size), torch.empty(size)) for name, size in shape.parameters().items()]
    load_shards(folder, shards)
    return {shard.name: shard.local for shard in shards}


def damage(folder: Path, seed: int) -> None:
    """One random change of one of the folder's files."""
    rng = random.Random(seed)
    file = rng.choice(sorted(path for path in folder.iterdir() if "tokenizer" not in path.name))
    content = bytearray(file.read_bytes())
    kind = rng.randrange(8)
    if kind == 0:
        file.unlink()
    elif kind == 1:
        file.write_bytes(content[: rng.randrange(len(content))])
    elif kind == 2 and file.name != INDEX_FILE:
        length = len(content) if file.suffix == ".json" else 8 + int.from_bytes(content[:8], "little")
        content[rng.randrange(length)] = rng.randrange(256)
        file.write_bytes(content)
    elif kind == 3:
        file.rename(file.with_name(rng.choice(["x", "model.safetensors", "consolidated.safetensors"])))
    elif file.suffix == ".safetensors":
        kinds = [torch.float16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float32]
        tensors = load_file(file)
        name = rng.choice(sorted(tensors))
        tensor = tensors.pop(name)
        other = rng.choice([name, f"{name}.x", name.replace("0", "1"), "lm_head.weight", "model.norm.weight"])
        tensors[other] = rng.choice([tensor, tensor[:-1], tensor.to(rng.choice(kinds)), tensor.unsqueeze(0)]).clone()
        if kind > 5:
            tensors[name] = tensor
        save_file(tensors, file)
    else:
        table = json.loads(content)
        place = table.get("weight_map", table)
        key = rng.choice(sorted(place))
        place[key] = rng.choice([None, 1, "x", True, *place.values()])
        file.write_text(json.dumps(table))


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("kind", ["single", "sharded", "tied"])
def test_a_file_of_its_whole_size_whose_rest_was_not_downloaded_is_named(
    kind: str, is_sparse: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = copied(folders[kind], tmp_path)
    file = folder / ("model.safetensors" if kind != "sharded" else SHARDS[1])
    whole, draw = file.read_bytes(), random.Random(0)
    ends = sorted(one.offset + one.num_bytes for one in read_stored(folder).values() if one.file == file and len(one.shape) > 1)
    start = int.from_bytes(whole[:8], "little") + 8
    for cut in [start, *(draw.randrange(start, ends[-1] - 70) | 1 for _ in range(30))]:
        with file.open("wb") as out:
            out.write(whole[:cut])
            out.truncate(len(whole)) if is_sparse else out.write(bytes(len(whole) - cut))
        assert "was not written to its end" in refusal(folder)
    with file.open("wb") as out:  # by parts, of which one is missing
        out.write(whole[:8192])
        out.seek(40960) if is_sparse else out.write(bytes(40960 - 8192))
        out.write(whole[40960:])
    if is_sparse:
        assert "was not written to its end" in refusal(folder)
    file.write_bytes(whole)
    check_model_folder(folder)


def test_tensors_that_start_as_zeros_are_accepted(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["tied"], tmp_path)
    file = folder / "model.safetensors"
    whole = load_file(file)
    for name, rows in ((EMBEDDING, slice(100, None)), (UP, slice(None)), ("model.norm.weight", slice(None))):
        tensors = {other: tensor.clone() for other, tensor in whole.items()}
        tensors[name][rows] = 0
        save_file(tensors, file)
        check_model_folder(folder)
        content = file.read_bytes()
        with file.open("wb") as out:  # as a file system that compresses keeps it: without the blocks of zeros
            for at in range(0, len(content), 4096):
                if content[at : at + 4096].strip(b"\0"):
                    out.seek(at)
                    out.write(content[at : at + 4096])
            out.truncate(len(content))
        check_model_folder(folder)
