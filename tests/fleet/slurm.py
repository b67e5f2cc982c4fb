"""A Slurm cluster on this machine: a controller and two nodes, each in a network, host-name and mount namespace."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ENVIRONMENT
from tests.fleet.network import Place, can_make_namespaces, namespaces

NAMES = ("node-a", "node-b")
_TOOLS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "munged")
_PORT = 17001
_CONF = """\
ClusterName=lab
SlurmctldHost=node-a({host})
SlurmctldPort=16817
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=10
JobRequeue=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_tools() -> list[str]:
    """Returns programs and rights that a cluster needs and this machine lacks."""
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return lacking if can_make_namespaces() else [*lacking, "root"]


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    """folder: shared by all nodes. `state`, within it, is another folder on each node."""

    folder: Path
    prefixes: Sequence[Sequence[str]]
    environment: dict[str, str]

    def run(self, *argv: str | Path, rank: int = 0) -> str:
        """Runs a command on a node and returns its output. Raises AssertionError with its errors."""
        done = subprocess.run(
            [*self.prefixes[rank], *argv],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Returns the fields of `scontrol show job`, such as JobState, Restarts and Reason."""
        shown = self.run("scontrol", "show", "job", number, "--oneliner")
        return dict(pair.split("=", 1) for pair in shown.split() if "=" in pair)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    with ExitStack() as stack:
        places = stack.enter_context(namespaces(2))
        environment = _write(folder, places)
        prefixes = [_prefix(folder, place, name) for place, name in zip(places, NAMES, strict=True)]
        munge = [
            f"--{key}={folder}/munge.{key.partition('-')[0]}"
            for key in ("socket", "pid-file", "log-file", "seed-file", "key-file")
        ]
        stack.enter_context(_running(["munged", "--foreground", "--force", *munge], environment, log=folder / "munged.log"))
        stack.enter_context(_running([*prefixes[0], "slurmctld", "-D"], environment, log=folder / "slurmctld.log"))
        for prefix, name in zip(prefixes, NAMES, strict=True):
            stack.enter_context(_running([*prefix, "slurmd", "-D"], environment, log=folder / f"slurmd-{name}.log"))
        cluster = SlurmCluster(folder, prefixes, environment)
        ends = time.monotonic() + 60
        while _states(cluster) != {"idle"}:
            assert time.monotonic() < ends, (folder / "slurmctld.log").read_text()
            time.sleep(0.5)
        try:
            yield cluster
        finally:
            cluster.run("scancel", "--state=RUNNING")
            while "RUNNING" in (left := cluster.run("squeue", "--noheader", "--format=%T")) or "COMPLETING" in left:
                time.sleep(0.5)


def _write(folder: Path, places: Sequence[Place]) -> dict[str, str]:
    """Writes configuration, key and host names. Returns the environment of every command."""
    for name in ("controller", "state", *(f"{kind}-{node}" for kind in ("spool", "state") for node in NAMES)):
        (folder / name).mkdir()
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={place.host} Port={_PORT} CPUs={os.cpu_count()}"
        for name, place in zip(NAMES, places, strict=True)
    )
    (folder / "slurm.conf").write_text(_CONF.format(host=places[0].host, folder=folder, nodes=nodes))
    hosts = [("127.0.0.1", "localhost"), *((place.host, name) for name, place in zip(NAMES, places, strict=True))]
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for address, name in hosts))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    folder.chmod(0o755)
    path = f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
    return {**ENVIRONMENT, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}


def _prefix(folder: Path, place: Place, name: str) -> list[str]:
    """Prefix that runs a command as on node `name`: with its network, its host name, and its folder at `state`."""
    enter = f'mount --bind {folder}/hosts /etc/hosts && mount --bind {folder}/state-{name} {folder}/state && hostname {name} && exec "$@"'
    return ["nsenter", f"--net=/run/netns/{place.prefix[-1]}", "unshare", "--uts", "--mount", "bash", "-c", enter, "-"]


@contextmanager
def _running(argv: Sequence[str], environment: dict[str, str], *, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(argv, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def _states(cluster: SlurmCluster) -> set[str]:
    try:
        return set(cluster.run("sinfo", "--noheader", "--Node", "--format=%t").split())
    except AssertionError:  # the controller is not up yet
        return set()
