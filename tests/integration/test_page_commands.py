"""Commands of the pages on audit, plan, journal, samples, trackers, certificates and doctor, run as written."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.dashboard import RECORDED
from tests.integration.test_operator_pages import commands, needs, run
from tests.models import make_model, save_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files under the names that the pages use: a model, a node's file and folder, a run and its journal."""
    for name in ("node", "runs/first", "runs/demo"):
        shutil.copytree(RECORDED, tmp_path / name)
    shutil.copy(RECORDED / "journal.sqlite", tmp_path)
    model = save_checkpoint(make_model("qwen2", seed=0), tmp_path / "models" / "my-model")
    shutil.copy(RECORDED / "model" / "tokenizer.json", model)
    (tmp_path / "node.toml").write_text('state_dir = "node"\n[model]\npath = "models/my-model"\n[rollout]\nkv_tokens = 4096\n')
    return tmp_path


@pytest.mark.parametrize("number", range(4))
async def test_audits_of_the_page_find_the_run_clean(number: int, folder: Path) -> None:
    lines = commands("audit.md", containing="tasuki audit")
    assert len(lines) == 4
    told = await run(lines[number], folder)
    assert json.loads(told)["is_clean"] if "--json" in lines[number] else told.splitlines()[0] == "clean"


@pytest.mark.parametrize("number", range(4))
async def test_plans_of_the_page_are_made(number: int, folder: Path) -> None:
    lines = commands("plan.md", containing="tasuki plan")
    assert len(lines) == 4
    assert "It fits." in await run(lines[number], folder)
    assert (folder / "plan.png").exists() is ("--plot plan.png" in lines[number])


async def test_the_query_of_stages_without_a_result_runs(folder: Path) -> None:
    needs("sqlite3")
    (line,) = commands("changeover.md", containing="sqlite3")
    assert await run(line, folder) == ""
    with sqlite3.connect(folder / "journal.sqlite") as journal:
        journal.execute("DELETE FROM results WHERE id = (SELECT max(id) FROM results)")
    assert len((await run(line, folder)).splitlines()) == 1


async def test_the_samples_without_a_reward_are_listed(folder: Path) -> None:
    needs("jq")
    (line,) = commands("client.md", containing="jq -r")
    samples = folder / "runs" / "demo" / "samples" / "step-000012.jsonl"
    shutil.copy(samples.with_name("step-000000.jsonl"), samples)
    failed = [one for one in map(json.loads, samples.read_text().splitlines()) if one["reward"] == 0]
    assert len((await run(line, folder)).splitlines()) == len(failed)


async def test_a_finished_run_is_sent_to_tensorboard(folder: Path) -> None:
    (line,) = commands("client.md", containing="tasuki track runs/demo")
    await run(line, folder)
    assert list((folder / "runs" / "demo").rglob("events.out.tfevents.*"))


async def test_the_doctor_of_the_page_finds_no_fault(folder: Path) -> None:
    (line,) = commands("troubleshooting.md", containing="tasuki doctor")
    assert " 0 fail" in (await run(line, folder)).splitlines()[-1]


async def test_certificates_of_a_fleet_are_made(tmp_path: Path) -> None:
    (line,) = commands("fleet.md", containing="tasuki certs")
    await run(line.replace("/shared/certs", "certs"), tmp_path)
    assert {"ca.pem", "node.pem", "node.key"} <= {path.name for path in (tmp_path / "certs").iterdir()}
