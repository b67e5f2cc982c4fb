"""Role of a certificate, from the facts that TLS reports, and the table of the roles of methods."""

import importlib
import pkgutil
from pathlib import Path

import pytest
from google.protobuf.descriptor import MethodDescriptor

import tasuki.v1
from tasuki.config.schema import CallerRole
from tasuki.rpc import methods
from tasuki.rpc.access import certified_callers
from tasuki.rpc.methods import METHODS, PathUse, standard_methods, unknown_method


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


ALL = {**METHODS, **standard_methods()}


def described() -> list[MethodDescriptor]:
    """All methods of tasuki.v1 services, including files that the table does not import."""
    names = [module.name for module in pkgutil.iter_modules(tasuki.v1.__path__) if module.name.endswith("_pb2")]
    files = [importlib.import_module(f"tasuki.v1.{name}").DESCRIPTOR for name in names]
    return [method for file in files for service in file.services_by_name.values() for method in service.methods]


@pytest.mark.parametrize("method", described(), ids=lambda method: method.full_name)
def test_every_described_method_has_a_role(method: MethodDescriptor) -> None:
    assert METHODS[f"/{method.containing_service.full_name}/{method.name}"].role in CallerRole


@pytest.mark.parametrize("path", standard_methods())
def test_health_and_reflection_are_for_every_role(path: str) -> None:
    assert ALL[path].role is CallerRole.VIEWER


def test_table_names_no_method_that_is_not_there() -> None:
    assert set(methods._ROLES) == {method.name for method in ALL.values()}


def test_a_method_of_no_table_is_for_nobody() -> None:
    assert unknown_method("/tasuki.v2.TrainerService/New").role is None


def test_reads_are_for_viewers_and_stages_for_peers() -> None:
    reads = {name for name, method in METHODS.items() if method.method.startswith(("Get", "List", "Watch"))}
    assert {METHODS[name].role for name in reads} == {CallerRole.VIEWER}
    stages = {"PublishWeights", "WithdrawWeights", "ReceiveWeights", "Drain", "Pause", "Resume"}
    assert {method.role for method in METHODS.values() if method.method in stages} == {CallerRole.PEER}
    changing = [method for method in METHODS.values() if method.needs_deadline]
    assert all(method.role is not None and method.role >= CallerRole.TRAINER for method in changing)


def test_a_path_is_looked_at_where_a_request_has_one() -> None:
    fields = {method.full_name.rpartition(".")[2]: set(method.input_type.fields_by_name) for method in described()}
    assert {method.method for method in METHODS.values() if method.path_use} == {
        n for n, own in fields.items() if "path" in own
    }
    assert METHODS["/tasuki.v1.TrainerService/LoadCheckpoint"].path_use is PathUse.READ
