"""`tasuki state`: shows the node's current state."""

from __future__ import annotations

import json
import sys

from tasuki.cli.node_tables import draw
from tasuki.cli.print_text import print_text
from tasuki.config.schema import NodeConfig
from tasuki.supervisor.node_snapshot import NodeReader, as_dict


def show_state(config: NodeConfig, *, as_json: bool, must_serve: bool = False) -> int:
    """Prints the node's state. Raises NodeDown if none runs.

    must_serve: return 1 while a service does not answer.
    """
    with NodeReader(config) as reader:
        snapshot = reader.read()
    if as_json:
        sys.stdout.write(json.dumps(as_dict(snapshot), indent=2) + "\n")
    else:
        print_text(draw(snapshot))
    return 1 if must_serve and snapshot.absent else 0
