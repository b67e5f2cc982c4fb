"""Files that a run leaves for an audit, after success or failure."""

import json
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.config.paths import journal_path, log_path, training_log_path
from tasuki.coordinator.journal import Journal
from tasuki.runs.folder import archived
from tasuki.wire.errors import PeerUnavailable
from tasuki.wire.stages import HOLDS, Phase

_KILLED_CLIENT = """
import os, signal, sys
from pathlib import Path
from tasuki.runs.folder import archived
with archived(Path(sys.argv[1]), Path(sys.argv[2])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("is_running", [True, False])
def test_a_failed_run_leaves_journal_and_logs_that_can_be_audited(
    is_running: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, output = tmp_path / "state", tmp_path / "output"
    log_path(state, "trainer").parent.mkdir(parents=True)
    for name in ("trainer.log", "trainer.log.old", "supervisor.log"):
        (log_path(state, "trainer").parent / name).write_text(name)
    training_log_path(state).write_bytes(b"")
    log_path(output, "rollout").parent.mkdir(parents=True)
    log_path(output, "rollout").write_text("of an earlier run")
    with closing(Journal(journal_path(state))) as journal:
        journal.begin_epoch("boot-1")
        changeover = journal.begin_changeover("r1", origin=HOLDS[Phase.TRAIN], target=Phase.ROLLOUT)
        journal.end_changeover(changeover, seconds=0.1, error=PeerUnavailable("the trainer was lost"))
        if not is_running:
            journal.close()
        with pytest.raises(RuntimeError, match="as it was"), archived(state, output):
            raise RuntimeError("as it was")
    assert sorted(path.name for path in log_path(output, "trainer").parent.iterdir()) == [
        "supervisor.log",
        "trainer.log",
        "trainer.log.old",
    ]
    assert training_log_path(output).exists()
    created = [path for path in output.rglob("*") if path.name != "logs"]
    assert created and not any(path.stat().st_mode & 0o077 for path in created), "files that others may read"
    assert main(["audit", "--json", str(output)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_failed"], report["journal"]) == (1, str(journal_path(output)))


def test_run_whose_client_was_killed_is_audited_by_the_nodes_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    state, output = tmp_path / "state", tmp_path / "output"
    state.mkdir()
    with closing(Journal(journal_path(state))) as journal:
        journal.begin_epoch("boot-1")
    shutil.copytree(state, output)  # an earlier life of the run ended in order
    with closing(Journal(journal_path(state))) as journal:
        journal.begin_epoch("boot-2")
        changeover = journal.begin_changeover("r1", origin=HOLDS[Phase.TRAIN], target=Phase.ROLLOUT)
        journal.end_changeover(changeover, seconds=0.1, error=PeerUnavailable("the trainer was lost"))
    killed = [sys.executable, "-c", _KILLED_CLIENT, str(state), str(output)]
    assert subprocess.run(killed, check=False, timeout=60).returncode == -signal.SIGKILL
    assert main(["audit", str(output)]) == 0
    text = capsys.readouterr().out
    assert f"read: {journal_path(state)} of the node" in text
    assert " failed=1 " in text
    shutil.rmtree(state)
    assert main(["audit", str(output)]) == 0
    assert " failed=0 " in capsys.readouterr().out
