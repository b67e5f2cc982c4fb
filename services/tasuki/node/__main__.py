"""Runs a node's supervisor, as `tasuki up` and `tasuki train` start it: python -m tasuki.node STATE_DIR LOCK_FD STARTER_FD"""

import faulthandler
import functools
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile

from tasuki.config.load import load_config
from tasuki.config.lock import StateLock, disk_full_at
from tasuki.config.paths import config_path
from tasuki.config.schema import NodeConfig
from tasuki.node.services import node_services
from tasuki.node.supervisor import Supervisor
from tasuki.rpc.logs import configure_logging
from tasuki.rpc.port import check_files
from tasuki.wire.errors import ServiceFailed, TasukiError
from tasuki.wire.printable import printable

_log = logging.getLogger("tasuki.node")
# What a coordinator writes at its start, with room to spare: pages of the journal, and its index.
_EPOCH_BYTES = 1 << 16


def main(state_dir: Path, *, lock_fd: int, starter_fd: int) -> int:
    """Returns the exit code: 0; 1 if a service failed; 2 for any other error."""
    faulthandler.enable(file=2)
    configure_logging("supervisor")
    try:
        config = load_config(config_path(state_dir))
        supervisor = Supervisor(
            state_dir,
            node_services(config),
            starter_fd=starter_fd,
            environment=service_environment(os.environ),
            max_restarts=config.restart.max_restarts,
            stall_s=config.coordinator.stall_s,
            progress_s=config.coordinator.progress_s,
            check_start=functools.partial(check_restart, config),
        )
        return supervisor.supervise(StateLock(lock_fd))
    except TasukiError as error:
        sys.stderr.write(printable(f"tasuki: error {error.reason}: {error.message}") + "\n")
        return 1 if isinstance(error, ServiceFailed) else 2
    except OSError as error:  # an unreadable or unwritable file or folder
        sys.stderr.write(printable(f"tasuki: error {type(error).__name__}: {error}") + "\n")
        return 2


def check_restart(config: NodeConfig, service: str) -> None:
    """Raises what would end the service right after its start: DiskFull, or InvalidArgument for a file of its port."""
    check_files(config, service)
    if service == "coordinator":
        try:
            with disk_full_at(config.state_dir), TemporaryFile(dir=config.state_dir) as file:
                file.write(bytes(_EPOCH_BYTES))
                file.flush()
        except OSError as error:  # the service's own start says what it is
            _log.warning("event=state_folder_not_tried error=%s", error)


def service_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of the node's processes. grpc logs nothing unless asked: at ERROR, strangers could fill the disk."""
    return {"GRPC_VERBOSITY": "NONE", **environment}


if __name__ == "__main__":
    folder, lock, starter = sys.argv[1:]
    sys.exit(main(Path(folder), lock_fd=int(lock), starter_fd=int(starter)))
