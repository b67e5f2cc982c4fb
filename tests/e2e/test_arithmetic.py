"""The arithmetic example on a tiny Llama: its script from the task to plain transformers, and its notebook on a running node."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.conftest import ENVIRONMENT, ROOT, RunningNode
from tests.extent import only_whole
from tests.models import EOS, char_tokenizer, make_model, save_checkpoint

EXAMPLE = ROOT / "client" / "examples" / "arithmetic"
NOTEBOOK = EXAMPLE / "arithmetic.ipynb"
TEMPLATE = "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}{% endfor %}<a>"
QUICK = ["train.num_steps=2", "train.max_batches=1", "trainer.learning_rate=1e-5"]
NUM_TAUGHT = 64
pytestmark = pytest.mark.timeout(600)

COMPARE = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import run
from tasuki.config.load import load_config
output = Path(sys.argv[2])
sys.exit(run.compare(load_config(output / "config.toml"), output, started=time.monotonic()))
"""


def save_tokenizer(folder: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned a quarter of the held-out sums, so that scores are neither 0 nor 1."""
    folder = tmp_path_factory.mktemp("taught")
    subprocess.run([sys.executable, EXAMPLE / "make_task.py", folder], env=ENVIRONMENT, check=True, timeout=60)
    rows = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()][:NUM_TAUGHT]
    save_tokenizer(folder / "model")
    tokenizer = char_tokenizer()
    texts = [f"<u>{row['prompt'][0]['content']}<a>{row['answer']:>3}" for row in rows]
    token_ids = torch.tensor([[*tokenizer.encode(text), EOS] for text in texts])
    model = make_model("llama_tied", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(200):
        logits = model(input_ids=token_ids).logits[:, -5:-1]
        loss = cross_entropy(logits.flatten(0, 1), token_ids[:, -4:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(model, folder / "model")
    save_tokenizer(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def finished(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Output folder and text of the finished script."""
    output = tmp_path_factory.mktemp("runs") / "arithmetic"
    settings = [part for override in QUICK for part in ("--set", override)]
    command = [sys.executable, EXAMPLE / "run.py", "--model", taught, "--output", output, *settings]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


@only_whole
def test_the_script_trains_and_the_exported_model_scores_the_same_in_transformers(finished: tuple[Path, str]) -> None:
    output, stdout = finished
    found = re.search(r"^held-out: (\S+) before, (\S+) after, (\S+) in transformers", stdout, re.MULTILINE)
    assert found is not None, stdout
    before, after, scored = map(float, found.groups())
    assert 0.1 < before < 0.9
    assert scored == pytest.approx(after, abs=0.03)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["policy_version"] >= 1  # a step makes no update if the rewards of every group are equal


@only_whole
def test_a_model_that_scores_otherwise_in_transformers_is_an_error(finished: tuple[Path, str]) -> None:
    output, _ = finished
    metrics = output / "metrics.jsonl"
    *steps, last = [json.loads(line) for line in metrics.read_text().splitlines()]
    last["metrics"]["eval/mean/exact"] += 0.05
    metrics.write_text("".join(json.dumps(step) + "\n" for step in [*steps, last]))
    command = [sys.executable, "-c", COMPARE, EXAMPLE, output]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "the exported model scores" in done.stderr


def test_the_notebook_runs_on_a_node(node: RunningNode, tmp_path: Path) -> None:
    """Runs every cell in order, as a kernel would, with other parameters."""
    subprocess.run([sys.executable, EXAMPLE / "make_task.py", tmp_path], env=ENVIRONMENT, check=True, timeout=60)
    save_tokenizer(tmp_path / "model")
    parameters = f"""
from pathlib import Path
EXAMPLE, STATE_DIR, TASK = Path({str(EXAMPLE)!r}), Path({str(node.state_dir)!r}), Path({str(tmp_path)!r})
MODEL = TASK / "model"
NUM_STEPS, PROMPTS_PER_STEP, GROUP_SIZE, NUM_EVAL, MAX_NEW_TOKENS, LEARNING_RATE = 2, 2, 4, 4, 4, 1e-4
"""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    sources = [parameters if "parameters" in cell["metadata"].get("tags", ()) else "".join(cell["source"]) for cell in cells]
    assert sources.count(parameters) == 1
    # A module: the rewards' workers must not run the cells again.
    program = tmp_path / "cells.py"
    program.write_text(
        "def run() -> None:\n    scope = {}\n    for source in " + repr(sources) + ":\n        exec(source, scope)\n"
    )
    command = [sys.executable, "-c", "import cells; cells.run()"]
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    versions = re.findall(r"^step \d: .* version (\d+)$", done.stdout, re.MULTILINE)
    assert len(versions) == 2 and int(versions[1]) == int(versions[0]) + 1
    assert re.search(r"^held-out: \S+ before, \S+ after$", done.stdout, re.MULTILINE)
