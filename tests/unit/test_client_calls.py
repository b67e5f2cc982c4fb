"""Calls of both clients: their verbs, locks and interrupts."""

import inspect
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tasuki.client import AsyncClient, Client
from tasuki.wire.errors import PeerUnavailable
from tests.conftest import ENVIRONMENT
from tests.extent import crossed
from tests.ports import free_port


def _verbs(cls: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(verb) for name, verb in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")
    }


def test_both_clients_have_the_same_verbs():
    own = _verbs(Client)
    del own["submit"]  # only a thread needs it
    assert _verbs(AsyncClient) == own


def test_both_clients_are_made_alike():
    assert inspect.signature(AsyncClient.__init__) == inspect.signature(Client.__init__)


ASKS = (Client.state, lambda client: next(client.watch()), lambda client: client.generate([[1]]))
ABSENT = {"unix:{folder}/none.sock": "No such file or directory", "127.0.0.1:{port}": "Connection refused"}


@pytest.mark.parametrize(("ask", "absent"), crossed(ASKS, ABSENT.items()))
def test_a_node_that_is_not_there_is_named_without_the_words_of_grpc(
    ask: Callable[[Client], object], absent: tuple[str, str], tmp_path: Path
) -> None:
    target, cause = absent
    place = target.format(folder=tmp_path, port=free_port())
    with Client(place) as client, pytest.raises(PeerUnavailable) as refused:
        ask(client)
    assert f"no coordinator answers at {place} ({cause}): " in refused.value.message
    shown = "".join(traceback.format_exception(refused.value))
    assert "debug_error_string" not in shown and "last error" not in shown


# In a separate process, since a lock that stays held blocks it forever.
def test_a_verb_within_a_function_that_the_client_runs_is_refused() -> None:
    with Client("unix:/nowhere") as client:

        async def within(_: AsyncClient) -> None:
            client.discard_gradients()

        with pytest.raises(RuntimeError, match="`discard_gradients` was called on the thread"):
            client.submit(within).result(timeout=10)


INTERRUPTED = """
import sys
from types import FrameType

def is_interrupted(work, at):
    seen = 0

    def trace(frame: FrameType, event: str, argument: object):
        nonlocal seen
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False

def interrupt_everywhere(work):
    at = 1
    while is_interrupted(work, at):
        assert work() == 7
        at += 1
    print(at)
"""
CLIENT = """
from tasuki.client import Client
from tasuki.client.sync_client import _verb

async def state(self):
    return 7

Client.state = _verb(state)
with Client("unix:/nowhere") as client:
    interrupt_everywhere(client.state)
"""
ASIDE = """
from tasuki.client.aside import Aside

aside = Aside("test")
interrupt_everywhere(lambda: aside.call(lambda: 7))
aside.close()
"""


@pytest.mark.parametrize("caller", [CLIENT, ASIDE], ids=["client", "aside"])
def test_an_interrupt_at_any_bytecode_of_a_call_leaves_the_next_one_answered(caller: str):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED + caller],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20, "bytecodes at which it was interrupted"
