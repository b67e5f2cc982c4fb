"""The clients with and without asyncio have the same verbs, with the same types."""

from __future__ import annotations

import inspect
import re

from tasuki.client import AsyncClient, Client


def _verbs(cls: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(verb) for name, verb in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")
    }


def test_both_clients_have_the_same_verbs_with_the_same_types():
    asynchronous, synchronous = _verbs(AsyncClient), _verbs(Client)
    assert asynchronous.keys() == synchronous.keys()
    for name, signature in synchronous.items():
        expected = asynchronous[name]
        assert signature.parameters == expected.parameters, name
        returned = re.sub(r"AsyncGenerator\[(\w+), None\]", r"Generator[\1, None, None]", expected.return_annotation)
        assert signature.return_annotation == returned, name


def test_both_clients_are_made_alike():
    assert inspect.signature(AsyncClient.__init__) == inspect.signature(Client.__init__)


def test_every_verb_of_the_service_is_there():
    named = {
        "generate",
        "begin_run",
        "forward_backward",
        "optim_step",
        "discard_gradients",
        "compute_log_probs",
        "compute_values",
        "save",
        "load",
        "export_model",
    }
    assert named | {"acquire", "state", "watch", "changeovers"} <= _verbs(Client).keys()
