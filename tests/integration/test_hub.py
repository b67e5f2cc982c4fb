"""Models and datasets by their ids from a stand-in of the hub, in processes of their own: the libraries read its address at import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasuki.config.load import load_config
from tests.hub import Hub, serving
from tests.models import make_model, save_checkpoint

ROWS = [{"question": "ab" * number, "answer": str(number), "photo": None} for number in range(1, 6)]
SPLITS = {"train": ROWS, "test": ROWS[:2]}
README = "---\nconfigs:\n" + "".join(
    f"- config_name: {name}\n  data_files:\n" + "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in SPLITS)
    for name in ("main", "other")
)
FETCH = """
import json, sys
from pathlib import Path
from tasuki.config.load import config_of
from tasuki.node.model_folder import weights_to_fetch, with_local_files
from tasuki.wire.errors import TasukiError
base = {"state_dir": "/tmp/state", "train": {"output_dir": "/tmp/out", "reward": {"function": "a:b"}}}
for model, dataset, whole in json.load(sys.stdin):
    columns = {"prompt": "question", "answer": "answer"}
    train = base["train"] | {"dataset": dataset, "eval_dataset": "org/sums:main:test", "columns": columns}
    given = config_of(base | {"model": {"path": model}, "train": train})
    try:
        config = with_local_files(given, has_weights=whole, has_rows=whole)
        lacking = weights_to_fetch(given)
        assert "rollout" not in config.model_fields_set
        found = {"model": str(config.model.path), "dataset": str(config.train.dataset), "eval": str(config.train.eval_dataset)}
        found["lacking"] = lacking
    except TasukiError as error:
        found = {"reason": error.reason, "message": error.message}
    print(json.dumps(found))
"""


def fetched(hub: Hub, home: Path, *cases: tuple[str, str, bool], **environment: str) -> list[dict[str, Any]]:
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), **environment}
    done = subprocess.run(
        [sys.executable, "-c", FETCH], input=json.dumps(cases), env=os.environ | own, cwd=home, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ids_become_local_files_once_and_every_failure_names_its_cure(tmp_path: Path) -> None:
    source = save_checkpoint(make_model("qwen2", seed=0), tmp_path / "model")
    model = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}
    files = {f"{split}.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode() for split, rows in SPLITS.items()}
    repos = {
        "models/Org/Tiny": {**model, "onnx/model.onnx": b"x", "consolidated.safetensors": b"x", "pytorch_model.bin": b"x"},
        "datasets/org/sums": {**files, "README.md": f"{README}---\n".encode()},
    }
    home = tmp_path / "hf"
    home.mkdir()
    cases = [
        ("Org/Tiny", "org/sums:main", False),
        ("Org/Tiny", "org/sums:main", True),
        ("Org/Tiny@main", "org/sums@main:other:train", True),
        ("Org/Gated", "org/sums:main", True),
        ("Org/Tinny", "org/sums:main", True),
        ("Org/Tiny@v9", "org/sums:main", True),
        ("Org/Tiny", "org/summs:main", True),
        ("Org/Tiny", "org/sums:third", True),
        ("Org/Tiny", "org/sums:main:dev", True),
    ]
    with serving(repos, gated=frozenset({"models/Org/Gated"})) as hub:
        (planned,) = fetched(hub, home, cases[0])
        assert planned["lacking"] == {"model.path": len(model["model.safetensors"])} and planned["dataset"] == "org/sums:main"
        assert {path.name for path in Path(planned["model"]).iterdir()} == set(model) - {"model.safetensors"}
        assert not any("datasets" in path or (path.startswith("GET") and "safetensors" in path) for path in hub.asked)
        first, other, *refused = fetched(hub, home, *cases[1:])
        assert planned["model"] == first["model"] == other["model"] and other["lacking"] == {}
        assert {path.name for path in Path(first["model"]).iterdir()} == set(model)
        assert (Path(first["model"]) / "model.safetensors").read_bytes() == model["model.safetensors"]
        chosen = [{name: row[name] for name in ("question", "answer")} for row in ROWS]
        for found in (first, other):
            assert [json.loads(line) for line in Path(found["dataset"]).read_text().splitlines()] == chosen
        assert [json.loads(line) for line in Path(first["eval"]).read_text().splitlines()] == chosen[:2]
        assert sum(path.endswith("model.safetensors") and path.startswith("GET") for path in hub.asked) == 1
        told = ["is gated: accept its terms", "neither a path here nor on the hub", "no such revision", "neither a path here"]
        for found, text in zip(refused, [*told, "'third' not found", "dev"], strict=True):
            assert found["reason"] == "INVALID_ARGUMENT"
            assert text in found["message"] and "\n" not in found["message"]
        hub.asked.clear()
        assert [found["model"] for found in fetched(hub, home, cases[0])] == [first["model"]]
        assert hub.asked == []  # a plan takes what the cache has
        offline = fetched(hub, home, cases[1], ("Org/Else", "org/sums:main", True), HF_HUB_OFFLINE="1")
        assert hub.asked == []
    assert offline[0] == first
    assert "Org/Else is neither a path" in offline[1]["message"] and "HF_HUB_OFFLINE is set" in offline[1]["message"]


def test_a_local_path_wins_and_a_file_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "node.toml").write_text(
        'state_dir = "s"\n[model]\npath = "Org/Tiny"\n[sft]\ndataset = "data/rows.jsonl"\neval_dataset = "org/sums@v1:main:test"\n'
        'output_dir = "org/out"\n'
    )
    config = load_config(tmp_path / "node.toml")
    assert (str(config.model.path), str(config.sft.eval_dataset)) == ("Org/Tiny", "org/sums@v1:main:test")
    assert (config.sft.dataset, config.sft.output_dir) == (tmp_path / "data/rows.jsonl", tmp_path / "org/out")
    (tmp_path / "Org/Tiny").mkdir(parents=True)
    assert load_config(tmp_path / "node.toml").model.path == tmp_path / "Org/Tiny"
