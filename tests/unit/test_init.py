"""`tasuki init`: what it writes can be planned and trained, and nothing is overwritten. Mistyped commands. The recipe for mathematics."""

import json
import re
import sys
from pathlib import Path

import pytest

from tasuki.cli import init
from tasuki.cli.__main__ import main
from tasuki.cli.math_rewards import correct
from tasuki.cli.train import check_data
from tasuki.config.load import load_config
from tasuki.planner.choose import choose
from tasuki.planner.node import GB, node_of
from tasuki.planner.plan import plan
from tasuki.planner.presets import MODELS
from tests.sparse_weights import write_sparse_weights
from tests.unit.memory_folder import write_tokenizer
from tests.unit.test_config_json import write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_sparse_weights(write_model(folder))
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return folder


def flags(model: Path, *, task: str = "match", device: str = "cpu") -> list[str]:
    return ["--model", str(model), "--task", task, "--device", device]


@pytest.mark.parametrize("task", init.TASKS)
def test_what_it_writes_is_planned_and_has_rows_that_can_be_trained(
    task: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "own"
    assert main(["init", str(folder), *flags(model, task=task)]) == 0
    printed = capsys.readouterr().out
    assert "\nIt fits: " in printed and f"\n  tasuki train {folder}/node.toml\n" in printed
    config = load_config(folder / "node.toml")
    check_data(config, config_dir=folder)
    assert (config.sft is not None, (folder / "rewards.py").exists()) == (task == "sft", task != "sft")
    assert main(["plan", str(folder / "node.toml")]) == 0


def test_no_file_is_replaced_and_none_written_then(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "rewards.py").write_text("mine")
    assert main(["init", str(tmp_path / "own"), *flags(model)]) == 2
    assert "error PATH_EXISTS: " in capsys.readouterr().err
    assert [(file.name, file.read_text()) for file in (tmp_path / "own").iterdir()] == [("rewards.py", "mine")]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], "--model: give --model: there is no terminal"),
        (["--model", "m"], "--task: give --task {math,match,sft}: "),
        (["--model", "m", "--task", "sft", "--device", "cuda", "--gpu-memory-gb", "24GB"], "--gpu-memory-gb: must be "),
        (["--model", "m", "--task", "sft", "--device", "cpu", "--data", "nowhere.jsonl"], "data: nowhere.jsonl is not a file"),
        (["--model", "./nowhere", "--task", "sft", "--device", "cpu"], "nowhere does not exist"),
    ],
)
def test_what_is_missing_or_wrong_is_named_and_nothing_is_written(
    given: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert main(["init", str(tmp_path / "own"), *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tasuki: error ") and named in error and error.count("\n") == 1
    assert not (tmp_path / "own").exists()


def test_what_no_flag_says_is_asked_until_it_is_an_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([str(model), "sums", "", "", ""])
    monkeypatch.setattr(init, "smallest_gpu_bytes", lambda: None)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert main(["init", str(tmp_path / "own")]) == 0
    config = load_config(tmp_path / "own" / "node.toml")
    assert config.train is not None and config.train.reward.function == "rewards:correct"
    assert (config.device, config.trainer.learning_rate) == ("cpu", 3e-5)
    assert "'sums' is not math or match or sft\n" in capsys.readouterr().out


def test_the_end_of_the_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def ended(_: str) -> str:
        raise EOFError

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ended)
    assert main(["init", str(tmp_path / "own")]) == 2
    assert "--model: the input ended" in capsys.readouterr().err


def test_a_card_without_room_for_all_parameters_trains_adapters_at_their_rate(model: Path, tmp_path: Path) -> None:
    larger = {"hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 24, "head_dim": 128}
    write_model(model, **larger, num_attention_heads=32, num_key_value_heads=8, vocab_size=32_000)
    write_sparse_weights(model)
    assert main(["init", str(tmp_path / "own"), *flags(model, device="cuda"), "--gpu-memory-gb", "48"]) == 0
    text = (tmp_path / "own" / "node.toml").read_text()
    assert "\nlora.rank = 32\n" in text and "\nlearning_rate = 1e-05  # adapters bear ten times" in text
    assert re.search(r"\n# micro_batch_tokens = \d+  # the planner's choice", text)
    assert main(["plan", str(tmp_path / "own" / "node.toml"), "--gpu-gb", "48"]) == 0


@pytest.mark.parametrize(("task", "field", "value"), [("math", "answer", "#### 3"), ("sft", "completion", "So 3")])
def test_questions_with_answers_become_rows_of_the_run(task: str, field: str, value: str, model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"question": "1 + 2 =", "answer": "#### 3", "solution": "So 3"}) + "\n")
    assert main(["init", str(tmp_path / "own"), *flags(model, task=task), "--data", str(data)]) == 0
    assert json.loads((tmp_path / "own" / "train.jsonl").read_text()) == {"prompt": "1 + 2 =", field: value}
    assert 'dataset = "train.jsonl"' in (tmp_path / "own" / "node.toml").read_text()


def test_own_rows_that_cannot_be_trained_are_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"question": "1 + 2 ="}) + "\n")
    assert main(["init", str(tmp_path / "own"), *flags(model), "--data", str(data)]) == 2
    error = capsys.readouterr().err
    assert "prompt" in error and f"{data}" in error
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("typed", "meant"), [("trian", "train"), ("logs", "dashboard"), ("lgos", "dashboard"), ("stop", "down"), ("qqq", "")]
)
def test_a_mistyped_command_names_the_one_that_was_meant(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([typed])
    _, is_hinted, hint = capsys.readouterr().err.strip().partition("did you mean ")
    assert (bool(is_hinted), hint.rstrip("?").partition(",")[0]) == (bool(meant), meant)


RECIPE = Path(__file__).parents[2] / "client" / "examples" / "math"
CONFIGS = {"24gb": "qwen2.5-1.5b", "48gb": "qwen2.5-7b", "80gb": "qwen2.5-7b", "141gb": "qwen2.5-32b"}


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("12 + 34 = 46", "46", 1),
        ("It is 46.", 46, 1),
        ("First 46, then 47", "46", 0),
        ("$1,200.00", "1200", 1),
        (r"\boxed{10{,}000}", "10,000", 1),
        ("It is 1{,}200", "200", 0),
        (r"\boxed{2,4}", "24", 0),
        (r"\boxed{2\frac{1}{2}}", "10.5", 0),
        ("-3", "3", 0),
        ("\N{MINUS SIGN}3", "3", 0),
        (r"so \boxed{46}, not 47", "46", 1),
        (r"\boxed{46} or rather \boxed{47}", "46", 0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{\left( 1, \sqrt{2} \right)}", r"(1,\sqrt{2})", 1),
        (r"\boxed{x^{2}", "2", 1),  # never closed: the last number counts
        (r"\boxed{12\text{ cm}}", "12", 1),
        ("1/0", "1/0", 1),
        ("no number", "5", 0),
        ("", "", 0),
        ("72", "48+24 = <<48+24=72>>72\n#### 72", 1),
        (r"\boxed{9}", r"The sum is $\boxed{9}$.", 1),
        ("9" * 20_000, "1", 0),
    ],
)
def test_the_last_answer_counts(completion: str, answer: str, reward: float) -> None:
    assert correct(completion, answer) == reward


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_fits_its_card(name: str) -> None:
    config = load_config(RECIPE / f"{name}.toml")
    gpu_bytes = int(name.removesuffix("gb")) * GB
    planned = plan(choose(node_of(config, MODELS[CONFIGS[name]], gpu_bytes=gpu_bytes, host_bytes=2000 * GB)))
    assert planned.fits
