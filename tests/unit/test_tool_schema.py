"""Schemas of an episode's tools, from their signatures and docstrings."""

import json
from functools import partial
from typing import Literal

import pytest

from tasuki.client.policy import Policy, tool_schema


def test_schemas_come_from_signature_and_docstring():
    def find(text: str, most: int = 3, kind: Literal["a", "b"] = "a", only: list[int] | None = None) -> str:
        """Finds a text.

        text: what to find
        most (int): how many
        """
        return text

    assert json.loads(json.dumps(tool_schema(find))) == {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds a text.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "what to find"},
                    "most": {"type": "integer", "description": "how many"},
                    "kind": {"type": "string", "enum": ["a", "b"]},
                    "only": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["text"],
            },
        },
    }

    def bare(x: int) -> int:
        return x

    def untyped(x) -> int:
        """Takes anything."""
        return 1

    for tool, problem in ((bare, "no docstring"), (untyped, "`x` needs a type")):
        with pytest.raises(TypeError, match=problem):
            tool_schema(tool)


def test_tools_without_a_schema_or_a_name_of_their_own_are_refused():
    def takes_any(*numbers: int, **named: int) -> str:
        """Adds."""
        return ""

    def add(a: int) -> str:
        """Adds."""
        return ""

    for tools, problem in (
        ([takes_any], r"takes_any: parameter `\*numbers: int`"),
        ([add, add], "differ"),
        ([partial(add, 1)], "differ"),
    ):
        with pytest.raises(TypeError, match=problem):
            Policy(lambda *_: None).chat(tools=tools)
