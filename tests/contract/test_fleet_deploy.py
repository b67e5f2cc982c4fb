"""deploy/slurm and deploy/kubernetes: the names in them exist, and a scheduler would accept them. Needs no cluster."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasuki.cli.__main__ import USER_ERROR
from tasuki.cli.arguments import make_parser
from tasuki.cli.fleet import fleet_table
from tasuki.node.services import EXIT_FLEET_ENDED

DEPLOY = Path(__file__).parents[2] / "deploy"
SBATCH = DEPLOY / "slurm" / "fleet.sbatch"
SCRIPT = SBATCH.read_text()
CRDS = sorted((Path(__file__).parents[2] / ".tools").glob("jobset-*.yaml"))
JOB_SET: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes" / "jobset.yaml").read_text())


def jobs() -> dict[str, Any]:
    return {job["name"]: job["template"]["spec"] for job in JOB_SET["spec"]["replicatedJobs"]}


def container(name: str) -> dict[str, Any]:
    (only,) = jobs()[name]["template"]["spec"]["containers"]
    return only


def environment(name: str, labels: dict[str, str]) -> dict[str, str]:
    """Returns the environment of a pod with these labels."""

    def value(entry: dict[str, Any]) -> str:
        if "value" in entry:
            return entry["value"]
        return labels[re.fullmatch(r"metadata\.labels\['(.*)'\]", entry["valueFrom"]["fieldRef"]["fieldPath"])[1]]

    return {entry["name"]: value(entry) for entry in container(name)["env"]}


def commands_of(text: str) -> list[list[str]]:
    """Returns every call of tasuki in a script, as words."""
    found = re.findall(r"(?:^|[\s;&|(])tasuki ([^\n;&|>)]*)", text)
    return [
        shlex.split(re.sub(r'"\$config"|/config/node.toml', "node.toml", each).replace('"$grace_s"', "90")) for each in found
    ]


def strict(schema: Any) -> Any:
    """Returns a Kubernetes API's schema as used by a server that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed["additionalProperties"] = False
    return closed


@pytest.mark.skipif(not CRDS, reason="no JobSet schema in .tools: make jobset")
def test_the_job_set_fits_the_schema_of_its_api() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    definition = yaml.safe_load(CRDS[-1].read_text())
    (schema,) = [one["schema"]["openAPIV3Schema"] for one in definition["spec"]["versions"] if one["name"] == "v1alpha2"]
    schema = strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.json_path + ": " + error.message for error in validator.iter_errors(JOB_SET)] == []
    wrong = yaml.safe_load((DEPLOY / "kubernetes" / "jobset.yaml").read_text())
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    wrong["spec"]["failurePolicy"]["maxRestarts"] = "8"
    # The leader and the workers share one mapping, so a wrong key in it counts twice.
    assert len({error.message for error in validator.iter_errors(wrong)}) == 2


@pytest.mark.parametrize(("name", "index"), [("leader", "0"), ("worker", "1")])
def test_pods_tell_each_node_its_place_and_the_restarts(name: str, index: str) -> None:
    labels = {
        "jobset.sigs.k8s.io/job-global-index": index,
        "jobset.sigs.k8s.io/restart-attempt": "3",
        "jobset.sigs.k8s.io/jobset-uid": "7f",
    }
    table = fleet_table(environment(name, labels))
    leader = f"{JOB_SET['metadata']['name']}-leader-0-0.{JOB_SET['metadata']['name']}:29400"
    assert table == {"num_nodes": 2, "node_rank": int(index), "attempt": 3, "name": "7f", "leader": leader}
    num_pods = sum(job["replicas"] for job in JOB_SET["spec"]["replicatedJobs"])
    assert num_pods == table["num_nodes"]


def test_a_refused_node_fails_the_job_set_and_a_lost_one_restarts_it() -> None:
    for job in jobs().values():
        (rule,) = job["podFailurePolicy"]["rules"]
        assert rule["onExitCodes"]["values"] == [USER_ERROR] and EXIT_FLEET_ENDED not in rule["onExitCodes"]["values"]
        assert rule["onExitCodes"]["containerName"] == "node" and job["backoffLimit"] == 0


@pytest.mark.parametrize("text", [SCRIPT, *(container(name)["args"][0] for name in jobs())])
def test_commands_are_those_that_tasuki_has(text: str) -> None:
    commands = commands_of(text)
    assert {tuple(words[:2])[: 1 if words[0] != "fleet" else 2] for words in commands} >= {
        ("fleet", "up"),
        ("fleet", "state"),
        ("train",),
    }
    for words in commands:
        assert make_parser().parse_args(words).config == Path("node.toml")
