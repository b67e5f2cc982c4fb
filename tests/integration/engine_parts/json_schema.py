"""JSON Schemas that no text follows."""

import json

import pytest

from tasuki.rollout.sglang.json_grammar import check_schema
from tasuki.wire.errors import InvalidArgument

SELF = {"$ref": "#"}


@pytest.mark.parametrize(
    "schema",
    [
        SELF,
        {"anyOf": [SELF]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"properties": {"x": {"$ref": "#/properties/x"}}},
    ],
)
def test_a_schema_that_refers_to_itself_alone_is_refused(schema: object):
    with pytest.raises(InvalidArgument, match="json_schema: refers to itself"):
        check_schema(json.dumps(schema))


@pytest.mark.parametrize("schema", [{"properties": {"x": SELF}}, {"anyOf": [SELF, {"type": "null"}]}])
def test_a_schema_that_ends_somewhere_may_refer_to_itself(schema: object):
    check_schema(json.dumps(schema))
