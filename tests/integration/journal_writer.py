"""Starts writers of a journal, kills each after a moment, and prints a JSON list of the entries that it acknowledged:

python journal_writer.py JOURNAL NUM_KILLS SEED

This is a separate process without threads, so that a writer is a fork with everything imported.
"""

import json
import os
import random
import signal
import sqlite3
import sys
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from tasuki.coordinator.journal import Journal, Outcome
from tasuki.coordinator.node import resolve_intents
from tasuki.coordinator.phases import path
from tasuki.v1.weights_pb2 import PublishedWeights
from tasuki.wire.stages import HOLDS, Phase, Stage

MOST_LINES, LONGEST_PAUSE_S = 30, 0.0005


def write_for_ever(journal_path: Path, acknowledge: int) -> NoReturn:
    """Writes what a coordinator with flawless services would; prints a line for each completed call of the journal."""
    journal = Journal(journal_path)
    say(acknowledge, f"epoch {journal.begin_epoch(uuid.uuid4().hex)}")
    journal.close_interrupted()
    at = next_place(journal, journal_path)
    resolve_intents(journal, at)
    while True:
        target = Phase.ROLLOUT if at in path(HOLDS[Phase.ROLLOUT], Phase.TRAIN) else Phase.TRAIN
        changeover_id = journal.begin_changeover(uuid.uuid4().hex, origin=at, target=target)
        say(acknowledge, f"changeover {changeover_id}")
        for stage in path(at, target):
            intent = journal.intend(stage, changeover_id, is_undo=False, trainer_boot_id="t", rollout_boot_id="r")
            say(acknowledge, f"intent {intent.id}")
            answer = PublishedWeights(boot_id="t").SerializeToString() if stage is Stage.LOAD_WEIGHTS else b""
            version = {Stage.LOAD_WEIGHTS: 0, Stage.SYNC: (journal.last(Stage.LOAD_WEIGHTS) or Outcome()).policy_version}.get(
                stage
            )
            journal.done(intent, Outcome(answer=answer, policy_version=version), seconds=0.001)
            say(acknowledge, f"result {intent.id}")
        journal.end_changeover(changeover_id, seconds=0.01, policy_version=0 if target is Phase.ROLLOUT else None)
        say(acknowledge, f"ending {changeover_id}")
        at = HOLDS[target]


def next_place(journal: Journal, journal_path: Path) -> Stage:
    """Returns the node's stage as its services would report it, if every intent without a result was carried out."""
    left = journal.unresolved()
    if left:
        return left[-1].stage
    with closing(sqlite3.connect(journal_path)) as db:
        row = db.execute("SELECT stage FROM stages ORDER BY id DESC LIMIT 1").fetchone()
    return Stage(row[0]) if row else HOLDS[Phase.TRAIN]


def say(pipe: int, line: str) -> None:
    os.write(pipe, f"{line}\n".encode())


def kill_one_writer(journal_path: Path, *, after: int, pause_s: float) -> list[str]:
    """Forks a writer, kills it `pause_s` after that many lines, and returns everything it acknowledged."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(journal_path, write_fd)
        finally:
            os._exit(1)  # it ends only by a signal
    os.close(write_fd)
    said = b""
    while said.count(b"\n") < after and (part := os.read(read_fd, 65536)):
        said += part
    time.sleep(pause_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, f"the writer ended by itself: {status}"
    while part := os.read(read_fd, 65536):
        said += part
    os.close(read_fd)
    return said.decode().splitlines()


def main() -> None:
    journal_path, num_kills, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    for _ in range(num_kills):
        said = kill_one_writer(journal_path, after=draw.randrange(MOST_LINES), pause_s=draw.uniform(0.0, LONGEST_PAUSE_S))
        sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
