"""Role of a certificate, from the facts that TLS reports."""

from pathlib import Path

import pytest

from tasuki.config.schema import CallerRole
from tasuki.rpc.access import certified_callers


class Context:
    """Call context, in the form that grpc passes to a handler."""

    def __init__(self, **shown: str) -> None:
        self._shown = {key: [value.encode()] for key, value in shown.items()}

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._shown


@pytest.mark.parametrize(
    ("shown", "role"),
    [
        ({"peer_spiffe_id": "spiffe://any/tasuki/viewer"}, CallerRole.VIEWER),
        ({"peer_spiffe_id": "spiffe://any/tasuki/peer", "x509_common_name": "x"}, CallerRole.PEER),
        ({"peer_spiffe_id": "spiffe://any/tasuki/admin"}, None),
        ({"peer_spiffe_id": "spiffe://any/team/tasuki/peer"}, None),
        ({"peer_spiffe_id": "spiffe://any/tasuki/peer/x"}, None),
        ({"x509_common_name": "spiffe://any/tasuki/peer"}, None),
        ({"x509_common_name": "peer"}, None),
        ({}, None),
    ],
)
def test_role_is_in_the_id_by_default(shown: dict[str, str], role: CallerRole | None) -> None:
    assert certified_callers(None)(Context(**shown)).role is role


@pytest.mark.parametrize(
    ("shown", "role"),
    [
        ({"peer_spiffe_id": "spiffe://lab/alice"}, CallerRole.OPERATOR),
        ({"peer_spiffe_id": "spiffe://lab/alice/x"}, None),
        ({"peer_spiffe_id": "spiffe://any/tasuki/peer"}, None),
        ({"x509_common_name": "ci"}, CallerRole.VIEWER),
        ({"peer_spiffe_id": "spiffe://lab/bob", "x509_common_name": "ci"}, None),
        ({"x509_common_name": "spiffe://lab/alice"}, None),
        ({"x509_common_name": "SPIFFE://lab/alice"}, None),
    ],
)
def test_the_table_alone_counts_where_there_is_one(tmp_path: Path, shown: dict[str, str], role: CallerRole | None) -> None:
    lines = ['"spiffe://lab/alice" = "operator"\n', '"SPIFFE://lab/alice" = "peer"\n', 'ci = "viewer"\n']
    (tmp_path / "roles.toml").write_text("".join(["[certificates]\n", *lines]))
    assert certified_callers(tmp_path / "roles.toml")(Context(**shown)).role is role


def test_name_of_a_caller_is_told_in_ascii() -> None:
    assert certified_callers(None)(Context(x509_common_name="a\nb\u202e")).name == "'a\\nb\\u202e'"
