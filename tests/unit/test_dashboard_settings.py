"""What differs from the defaults, and the newest lines of logs."""

from pathlib import Path

from tasuki.config.load import config_of
from tasuki.dashboard.logs import read_logs
from tasuki.dashboard.places import read_settings


def test_only_what_differs_from_the_defaults_or_has_none_is_listed(tmp_path: Path) -> None:
    run = {
        "dataset": "a.jsonl",
        "output_dir": "run",
        "reward": {"function": {"x": "r:x"}, "weights": {"x": 2.0}},
        "algorithm": "dapo",
    }
    table = {
        "state_dir": "s",
        "model": {"path": "m"},
        "device": "cpu",
        "trainer": {"learning_rate": 1e-3, "eps": 1e-8},
        "train": run,
    }
    found = read_settings(None, config_of(table))
    assert {one["key"]: (one["value"], one["default"] is None) for one in found["changed"] if "/" not in one["value"]} == {
        "device": ("cpu", True),
        "trainer.learning_rate": ("0.001", False),
        "train.reward.function.x": ("r:x", True),
        "train.reward.weights.x": ("2.0", True),
        "train.algorithm": ("dapo", False),
    }
    run["algorithm"] = "grpo"
    assert "train.algorithm" not in {one["key"] for one in read_settings(None, config_of(table))["changed"]}
    assert "warmup_steps = 0" in found["toml"] and found["provenance"] == {}


def test_logs_of_all_processes_are_in_their_order_and_a_traceback_keeps_its_line(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    at = "2026-11-29 01:00:0"
    trainer = f"Python warned\n{at}2,000 ERROR service=trainer lost\nTraceback:\n  x\n{at}5,000 INFO service=trainer on\n"
    (tmp_path / "logs" / "trainer.log").write_text(trainer)
    (tmp_path / "logs" / "rollout.log").write_text(f"{at}1,000 INFO up\n{at}3,000 WARNING slow\n")
    texts = [line["text"] for line in read_logs(tmp_path, only_warnings=False)["lines"]]
    assert texts == ["Python warned", "up", "service=trainer lost", "Traceback:", "  x", "slow", "service=trainer on"]
    warned = read_logs(tmp_path, only_warnings=True)["lines"]
    assert [(line["process"], line["level"]) for line in warned] == [("trainer", "ERROR")] * 3 + [("rollout", "WARNING")]
