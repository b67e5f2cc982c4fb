"""A node of small processes under the real supervisor:

python supervised_node.py STATE_DIR LOCK_FD STARTER_FD MAX_RESTARTS NAME=KIND...

Kinds: "good" stops on request together with its child, "deaf" ignores SIGTERM, "dies" exits with code 7 soon after its start, "fails"
does so before the supervisor goes on, "stops" is stopped by SIGSTOP at once, "late" is good, but listens a second after "beside" starts.
"lingers" is good, with one more child, the one of `exiting_process`, whose pids it writes to NAME.lingering.

A file NAME.hindered in the state folder keeps a service from being started again.

Names: "bounded" limits the wait for exiting processes to 4 s. "beats" has a heartbeat. "beside" waits for "first" except at the node's
start, and records whether that listens. Each service has a socket, a child in another session, and a file and a semaphore in shared
memory, as engines and trainers do.
"""

import mmap
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

SHM = Path("/dev/shm")


def service(name: str, kind: str, *, state_dir: Path, run_folder: Path) -> None:
    if name == "beside":
        with (state_dir / "beside.saw").open("a") as saw:
            saw.write(f"{is_listening(run_folder / 'first.sock')}\n")
    if kind == "late":
        while not (state_dir / "beside.saw").exists():
            time.sleep(0.05)
        time.sleep(1.0)
        kind = "good"
    lingering = state_dir / f"{name}.lingering"
    if kind == "lingers" and not lingering.exists():
        from tests.integration.exiting_process import fork_init

        lingering.write_text(" ".join(map(str, fork_init())))
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    address = run_folder / f"{name}.sock"
    address.unlink(missing_ok=True)  # left by a killed process
    listener.bind(str(address))
    listener.listen()
    # A child inherits an ignored signal, so the child of a deaf service is deaf too.
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with (SHM / f"tasuki-test-{os.getpid()}").open("w+b") as file:
        file.truncate(4096)
        mapping = mmap.mmap(file.fileno(), 4096)
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    # After a kill, only this module's resource tracker would remove it, and that is killed as well.
    (state_dir / f"{name}.semaphore").write_text(semaphore._semlock.name)
    if kind in ("good", "lingers"):
        signal.signal(signal.SIGTERM, lambda *_: (child.terminate(), os._exit(0)))
    if name == "beats":
        from tasuki.rpc.heartbeat import Heartbeat

        Heartbeat(state_dir, name).beat_in_thread()
    pids = state_dir / f"{name}.pids"
    if not pids.exists():
        listener.accept()[0].close()  # accepts the supervisor's check that the service serves, made once in a node's life
    pids.write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1.0 if kind == "dies" else 600)
    del mapping, semaphore
    sys.exit(7)


def check_start(state_dir: Path, name: str) -> None:
    from tasuki.wire.errors import InvalidArgument

    if (state_dir / f"{name}.hindered").exists():
        raise InvalidArgument("security.cert", "is away")


def is_listening(address: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(address)) == 0


def main() -> int:
    if sys.argv[1] == "service":
        service(sys.argv[2], sys.argv[3], state_dir=Path(sys.argv[4]), run_folder=Path(sys.argv[5]))
    from tasuki.config.lock import StateLock
    from tasuki.config.paths import socket_dir
    from tasuki.node.services import ServiceCommand
    from tasuki.node.supervisor import Supervisor
    from tasuki.rpc.logs import configure_logging

    configure_logging("supervisor")
    state_dir = Path(sys.argv[1])
    run_folder = socket_dir(state_dir)
    kinds = dict(argument.split("=") for argument in sys.argv[5:])
    services = [
        ServiceCommand(
            name=name,
            argv=[sys.executable, __file__, "service", name, kind, str(state_dir), str(run_folder)],
            target=f"unix:{run_folder / name}.sock",
            after="first" if name == "beside" else None,
        )
        for name, kind in kinds.items()
    ]
    environment = {key: value for key, value in os.environ.items() if key in ("PATH", "PYTHONPATH")}
    supervisor = Supervisor(
        state_dir,
        services,
        starter_fd=int(sys.argv[3]),
        environment=environment,
        max_restarts=int(sys.argv[4]),
        stall_s=2.0,
        progress_s=300.0,
        check_start=partial(check_start, state_dir),
    )
    return supervisor.supervise(StateLock(int(sys.argv[2])))


if __name__ == "__main__":
    sys.exit(main())
