"""Rules of tasuki.v1 that buf cannot express."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto

from tasuki.wire.channel import CLIENT_OPTIONS

PROTOS = Path(__file__).parents[2] / "protos"
# Path components of SourceCodeInfo: field numbers of FileDescriptorProto.service and ServiceDescriptorProto.method.
SERVICE_FIELD, METHOD_FIELD = 6, 2
READS = re.compile(r"Get|List|Watch|Compute|Plan|Measure|Generate$")


@cache
def files() -> list[FileDescriptorProto]:
    """Every file of tasuki.v1, with its comments."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("tasuki/v1/*.proto"))
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", "--include_source_info", "--descriptor_set_out=/dev/stdout"]
    out = subprocess.run([*protoc, *sources], cwd=PROTOS, check=True, capture_output=True).stdout
    return list(FileDescriptorSet.FromString(out).file)


def rpcs() -> Iterator[tuple[str, MethodDescriptorProto, str]]:
    """(Service/Method, method, leading comment)."""
    for file in files():
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        for s, service in enumerate(file.service):
            for m, method in enumerate(service.method):
                yield f"{service.name}/{method.name}", method, comments.get((SERVICE_FIELD, s, METHOD_FIELD, m), "")


def messages() -> dict[str, DescriptorProto]:
    return {f".{file.package}.{message.name}": message for file in files() for message in file.message_type}


RPCS = {name: (method, comment) for name, method, comment in rpcs()}


# The store's calls are torch.distributed's, without an identity; a rank makes each once.
@pytest.mark.parametrize(
    "name", [name for name in RPCS if not READS.match(name.partition("/")[2]) and not name.startswith("RankStoreService/")]
)
def test_mutating_request_can_be_recognized_when_repeated(name: str) -> None:
    request = messages()[RPCS[name][0].input_type]
    fields = list(request.field)
    if fields[0].name == "header":  # first message of a stream
        fields = list(messages()[fields[0].type_name].field)
    if name.startswith("FleetService/"):  # a node is identified by its start
        assert {"boot_id", "node"} & {field.name for field in fields}
        return
    # The coordinator assigns epochs and sequences, so its callers only name their intent.
    wanted = ("request_id", "") if name.startswith("CoordinatorService/") else ("command", ".tasuki.v1.CommandId")
    assert wanted in [(field.name, field.type_name) for field in fields]


def test_every_rpc_has_its_own_request_and_response() -> None:
    types = [name for method, _ in RPCS.values() for name in (method.input_type, method.output_type)]
    assert len(types) == len(set(types))
    assert all(method.input_type == f".tasuki.v1.{method.name}Request" for method, _ in RPCS.values())


def test_every_enum_starts_with_unspecified() -> None:
    zeros = [value.name for file in files() for enum in file.enum_type for value in enum.value if value.number == 0]
    assert len(zeros) == sum(len(file.enum_type) for file in files())
    assert all(name.endswith("_UNSPECIFIED") for name in zeros)


def test_channel_retries_existing_reads_only() -> None:
    config = json.loads(str(dict(CLIENT_OPTIONS)["grpc.service_config"]))
    retried = [f"{name['service']}/{name['method']}" for entry in config["methodConfig"] for name in entry["name"]]
    reads = {f"tasuki.v1.{name}" for name in RPCS if re.match(r"Get|List", name.partition("/")[2])}
    assert set(retried) == reads
