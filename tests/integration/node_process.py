"""A node of test services under the real supervisor, observed from outside."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasuki.config.lock import NODE_LOCK, StateLock, holder
from tasuki.config.paths import exit_path, socket_dir
from tests.limits import limit_s, wait_for

NODE = Path(__file__).with_name("supervised_node.py")


LIMIT_S = limit_s(10.0)
_LOOKS = 5


@dataclass
class Node:
    """A supervised node of test services; remembers the resources of its healthy state."""

    state_dir: Path
    process: subprocess.Popen[bytes]
    starter_fd: int
    names: list[str]
    pids: list[int] = field(default_factory=list)

    def wait_until_up(self) -> None:
        files = [self.state_dir / f"{name}.pids" for name in self.names]
        wait_for(lambda: all(file.exists() and len(file.read_text().split()) == 2 for file in files))
        self.pids = [int(pid) for file in files for pid in file.read_text().split()]

    def wait_until_recorded(self) -> None:
        """Waits until guard and supervisor know who holds which shared memory: each looks at it between two sleeps.

        A process that is killed before cannot report it.
        """
        self.wait_until_up()
        pids = (self.process.pid, self.supervisor_pid)
        slept = [num_sleeps(pid) for pid in pids]
        wait_for(lambda: all(num_sleeps(pid) > before + _LOOKS for pid, before in zip(pids, slept, strict=True)))

    @property
    def supervisor_pid(self) -> int:
        pid = holder(self.state_dir, name=NODE_LOCK)
        assert pid is not None
        return pid

    def assert_gone(self) -> None:
        wait_for(lambda: holder(self.state_dir, name=NODE_LOCK) is None)
        assert [pid for pid in (self.process.pid, *self.pids) if is_alive(pid)] == []
        assert list(socket_dir(self.state_dir).iterdir()) == []
        shm = Path("/dev/shm")
        assert [pid for pid in self.pids if (shm / f"tasuki-test-{pid}").exists()] == []
        semaphores = [file.read_text().removeprefix("/") for file in self.state_dir.glob("*.semaphore")]
        assert len(semaphores) == len(self.names)
        assert [name for name in semaphores if (shm / f"sem.{name}").exists()] == []

    @property
    def exit(self) -> dict[str, Any]:
        return json.loads(exit_path(self.state_dir).read_text())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def num_sleeps(pid: int) -> int:
    """Times that the process has waited for something."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])


Start = Callable[..., Node]


@contextmanager
def nodes_in(folder: Path) -> Iterator[Start]:
    """Yields a function that starts nodes on the folder; none of their processes outlives the block."""
    nodes: list[Node] = []

    def start(max_restarts: int = 0, **kinds: str) -> Node:
        state_dir = folder / "state"
        lock = StateLock.take(state_dir, name=NODE_LOCK)
        read_fd, starter_fd = os.pipe()
        argv = [sys.executable, str(NODE), str(state_dir), str(lock.fd), str(read_fd), str(max_restarts)]
        argv += [f"{name}={kind}" for name, kind in kinds.items()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(argv, pass_fds=(lock.fd, read_fd), start_new_session=True, env=environment)
        lock.close()
        os.close(read_fd)
        nodes.append(Node(state_dir, process, starter_fd, list(kinds)))
        return nodes[-1]

    try:
        yield start
    finally:
        for node in nodes:
            for pid in (node.process.pid, *node.pids):
                if is_alive(pid):
                    with suppress(ProcessLookupError):  # it may end in the meantime
                        os.kill(pid, signal.SIGKILL)
            node.process.wait()
            # The guard may be removing the same folder.
            shutil.rmtree(socket_dir(node.state_dir), ignore_errors=True)


def pids_of(node: Node, name: str) -> list[int]:
    return [int(pid) for pid in (node.state_dir / f"{name}.pids").read_text().split()]
