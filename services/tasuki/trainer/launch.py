"""Starts the ranks of a trainer on this machine and ends them together:

python -m tasuki.trainer.launch --num-ranks N [--preload MODULE] -- -m tasuki.trainer --config node.toml

torchrun's ranks meet through a TCP store, which accepts keys from every user of the machine and unpickles some of them. These ranks
meet in a file that only their user can open.
"""

import argparse
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from tasuki.rpc.process_start import preload
from tasuki.wire.errors import InvalidArgument

if TYPE_CHECKING:
    from tasuki.config.schema import FleetConfig

# A rank needs up to 5 s for running calls and 5 s more for its threads.
_GRACE_S = 15.0
_LAST_WORDS_S = 2.0
"""Time for the other ranks to report an error after one fails: often all fail of the same cause, which only rank 0 reports."""
_TICK_S = 0.05
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Launch:
    """A rank's place in a launch."""

    rank: int
    local_rank: int
    num_ranks: int
    launcher_fd: int
    """pidfd of the launcher, readable once it has ended."""
    store_path: Path
    """File, private to this launch, through which the node's ranks meet."""

    @property
    def launch_id(self) -> str:
        """Name of this launch, shared by its ranks."""
        return self.store_path.parent.name

    def environment(self) -> dict[str, str]:
        """Variables from which `read_launch` restores this value. The first three are torchrun's."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.num_ranks),
            "TASUKI_LAUNCHER_FD": str(self.launcher_fd),
            "TASUKI_STORE": str(self.store_path),
        }


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Reads the launcher's variables. Raises InvalidArgument in a process that it did not start."""
    try:
        return Launch(
            rank=int(environment["RANK"]),
            local_rank=int(environment["LOCAL_RANK"]),
            num_ranks=int(environment["WORLD_SIZE"]),
            launcher_fd=int(environment["TASUKI_LAUNCHER_FD"]),
            store_path=Path(environment["TASUKI_STORE"]),
        )
    except KeyError as error:
        raise InvalidArgument(
            "launch",
            f"{error.args[0]} is not set; start the trainer by: python -m tasuki.trainer.launch --num-ranks N -- -m tasuki.trainer ...",
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tasuki.trainer.launch")
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument(
        "--preload", metavar="MODULE", help="import it once, and fork the ranks instead of spawning them; not for GPUs"
    )
    parser.add_argument("command", nargs="+", help="of every rank, after --: -m module, or a script, and its arguments")
    arguments = parser.parse_args(argv)
    if arguments.num_ranks < 1:
        parser.error("--num-ranks must be at least 1")
    _drop_variables()
    if arguments.preload is not None:
        if arguments.command[0] != "-m" or len(arguments.command) < 2:
            parser.error("--preload forks ranks that run a module: give -m MODULE after --")
        _preload(arguments.preload)
    start = _spawn if arguments.preload is None else _fork
    # Created with mode 0700, whatever the umask.
    with tempfile.TemporaryDirectory(prefix="tasuki-ranks-") as folder:
        return run_ranks(partial(start, arguments.command), num_ranks=arguments.num_ranks, store_path=Path(folder, "store"))


def _drop_variables() -> None:
    """Must run before torch is imported, which reads them."""
    dropped = foreign_variables(os.environ)  # noqa: TID251 - this process's `__main__`
    for name in dropped:
        del os.environ[name]  # noqa: TID251
    if dropped:
        sys.stderr.write(f"tasuki.trainer: event=environment_dropped names={','.join(dropped)}\n")


def _preload(module: str) -> None:
    """Imports what every rank needs. A stop signal ends this process at once, since there is nothing to clean up yet."""

    def leave(number: int, _: FrameType | None) -> None:
        os._exit(128 + number)

    for number in _STOP_SIGNALS:
        signal.signal(number, leave)
    chosen = set(os.environ)  # noqa: TID251 - this process's `__main__`
    preload(module)
    # Importing torch sets a folder in /tmp; each rank sets its node's instead.
    for name in CACHE_VARIABLES - chosen:
        os.environ.pop(name, None)  # noqa: TID251


def _spawn(command: Sequence[str], launch: Launch) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **launch.environment()}  # noqa: TID251 - the rank's `__main__` reads it
    flags = ["-P"] if sys.flags.safe_path else []
    return subprocess.Popen([sys.executable, *flags, *command], env=environment, pass_fds=(launch.launcher_fd,))


def _fork(command: Sequence[str], launch: Launch) -> "ForkedRank":
    return ForkedRank(command[1:], environment=launch.environment(), taken=_STOP_SIGNALS)


def run_ranks(start: "Callable[[Launch], subprocess.Popen[bytes] | ForkedRank]", *, num_ranks: int, store_path: Path) -> int:
    """Starts each rank and waits until all have ended. Returns 0, or the exit code of the first that failed.

    After a rank has failed or this process is told to stop, all get SIGTERM, and after a grace period SIGKILL.
    Death by signal N counts as exit code 128 + N. Takes over this process's stop signals.
    """
    orders: list[int] = []
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda order, _: orders.append(order))
    launcher_fd = os.pidfd_open(os.getpid())
    ranks: list[subprocess.Popen[bytes] | ForkedRank] = []
    try:
        for rank in range(num_ranks):
            launch = Launch(rank=rank, local_rank=rank, num_ranks=num_ranks, launcher_fd=launcher_fd, store_path=store_path)
            ranks.append(start(launch))
        return _wait(ranks, orders)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        os.close(launcher_fd)


def _wait(ranks: "Sequence[subprocess.Popen[bytes] | ForkedRank]", orders: Sequence[int]) -> int:
    """orders: stop signals received, appended from outside."""
    exit_code, stop_at, kill_at = 0, math.inf, math.inf
    while running := [rank for rank in ranks if rank.poll() is None]:
        exit_code, now = exit_code or _failure(ranks), time.monotonic()
        if orders or exit_code:
            stop_at = min(stop_at, now if orders else now + _LAST_WORDS_S)
        if now >= stop_at and kill_at == math.inf:
            kill_at = now + _GRACE_S
            for rank in running:
                rank.terminate()
        if now >= kill_at:
            for rank in running:
                rank.kill()
        time.sleep(_TICK_S)
    return exit_code or _failure(ranks)


def _failure(ranks: "Sequence[subprocess.Popen[bytes] | ForkedRank]") -> int:
    """Exit code of a failed rank; 0 if none has failed."""
    code = next((code for rank in ranks if (code := rank.poll())), 0)
    return 128 - code if code < 0 else code


class ForkedRank:
    """A process with those methods of `subprocess.Popen` that the launcher uses."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], taken: Sequence[signal.Signals]) -> None:
        """Starts `python -m` with the command's module and arguments. Call it before any thread starts.

        environment: added to this process's. taken: signals handled by this process, reset to their defaults in the rank.
        """
        assert threading.active_count() == 1, threading.enumerate()
        self.returncode: int | None = None
        # Blocked until the rank has reset the launcher's handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, environment, taken=taken, mask=mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def poll(self) -> int | None:
        """Exit code, -N for signal N; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Exit code, once it has ended."""
        return self._reap(0)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:  # the pid cannot be reused until it is reaped
            os.kill(self.pid, number)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _become(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    taken: Sequence[signal.Signals],
    mask: Iterable[int],
) -> None:
    """Never returns, so that the rank skips the launcher's cleanup."""
    code = 1
    try:
        for number in taken:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ |= environment  # noqa: TID251 - the rank's `__main__` reads it
        code = _run(command)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception:  # noqa: BLE001 - a process ends here, and nobody above could tell why
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(command: Sequence[str]) -> int:
    sys.argv = list(command)
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


# Ranks of one node need no network. By default gloo and NCCL listen on the address of the host's name.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

# Settings of torch.compile. One inherited from a shell could silently change log-probs or disable compilation.
_COMPILER = ("TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE_", "UNSAFE_SKIP_FSDP_")
# Its file locations and logging, which are harmless.
_KEPT_ENDS = ("_DIR", "_LOGS", "_LOG_LEVEL")


def foreign_variables(names: Iterable[str]) -> list[str]:
    """Variables that ranks must not inherit, sorted."""
    return sorted(name for name in names if name.startswith(_COMPILER) and not name.endswith(_KEPT_ENDS))


def socket_variables(fleet: "FleetConfig | None") -> dict[str, str]:
    """Network interfaces of collectives. NCCL has one for all groups of a process, by default its own choice or the user's variable; gloo
    uses another between nodes (replicas.py)."""
    if fleet is None or fleet.num_nodes == 1:
        return dict(LOOPBACK)
    between_nodes = {} if fleet.interface is None else {"NCCL_SOCKET_IFNAME": f"={fleet.interface}"}
    return {"GLOO_SOCKET_IFNAME": LOOPBACK["GLOO_SOCKET_IFNAME"], **between_nodes}


def nccl_log_variables(fleet: "FleetConfig | None", *, path: Path) -> dict[str, str]:
    """Makes NCCL log which transport it chooses between nodes. It logs while it connects, not during collectives."""
    if fleet is None or fleet.num_nodes == 1:
        return {}
    # NCCL expands %h and %p.
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(path.resolve()).replace("%", "%%")}


def cache_variables(state_dir: Path) -> dict[str, str]:
    """Variables that make FlashAttention-4 and torch.compile cache kernels in the node's private folder.

    By default the former caches none, and the latter uses a folder in /tmp that another user could create to have code run.
    """
    return {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(state_dir.resolve() / "attention-kernels"),
        "TORCHINDUCTOR_CACHE_DIR": str(state_dir.resolve() / "compiled-blocks"),
    }


CACHE_VARIABLES = frozenset(cache_variables(Path()))


if __name__ == "__main__":
    sys.exit(main())
