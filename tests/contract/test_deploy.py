"""deploy/: names in compose.yaml and the Dockerfile exist and fit the rest of the repository. Needs no Docker."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasuki.cli.__main__ import _parser
from tasuki.config.load import load_config
from tasuki.supervisor.stop import STOP_TIMEOUT_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
COMMANDS = {
    **{name: SERVICES[name]["command"] for name in ("node", "train")},
    "healthcheck": SERVICES["node"]["healthcheck"]["test"][1:],
}


def folders_of(service: str) -> dict[str, str]:
    """Returns mounts by folder in the container, as they are when no variable is set."""
    mounts = (re.fullmatch(r"(?:\$\{\w+:-([^}]+)\}|(\w+)):([^:]+)(?::ro)?", text) for text in SERVICES[service]["volumes"])
    return {mount[3]: mount[1] or mount[2] for mount in mounts if mount}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_one_that_tasuki_takes(name: str):
    program, *arguments = COMMANDS[name]
    assert program in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert _parser().parse_args(arguments).config == Path("/config/node.toml")


def test_certificates_go_where_the_node_and_prometheus_look_for_them():
    arguments = _parser().parse_args(SERVICES["certs"]["command"][1:])
    (ports,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL | re.MULTILINE)
    named = tomllib.loads(ports)
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "compose.yml").read_text())["scrape_configs"][0]
    files = [*named["security"].values(), *scraped["tls_config"].values()]
    assert {Path(file).parent for file in files} == {arguments.folder}
    (target,) = scraped["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in SERVICES and host in arguments.hosts
    assert named["metrics"]["listen"].endswith(f":{port}")


def test_the_ports_of_the_page_are_those_that_are_published():
    page = (ROOT / "docs" / "deploy.md").read_text()
    published = yaml.safe_load((DEPLOY / "compose.tls.yaml").read_text())["services"]["node"]["ports"]
    assert sorted(text.rpartition(":")[2] for text in published) == sorted(re.findall(r'listen = "0\.0\.0\.0:(5\d+)"', page))


def test_only_a_node_that_serves_is_healthy():
    assert _parser().parse_args(COMMANDS["healthcheck"][1:]).serving


def test_a_run_resumes_and_starts_no_node_of_its_own_beside_the_one_of_the_other_container():
    arguments = _parser().parse_args(COMMANDS["train"][1:])
    assert arguments.resume
    assert arguments.no_start


def test_the_example_keeps_to_the_folders_that_are_mounted():
    folders = folders_of("node")
    assert len(folders) == len(SERVICES["node"]["volumes"])
    assert (DEPLOY / folders["/config"]).resolve() == DEPLOY / "config"
    config = load_config(DEPLOY / folders["/config"] / "node.toml")
    assert config.train is not None
    for path, folder in ((config.state_dir, "/state"), (config.model.path, "/models"), (config.train.output_dir, "/runs")):
        assert path.is_relative_to(folder)
        assert folder in folders


def test_a_volume_has_a_folder_of_the_user_in_the_image():
    named = {folder for folder, source in folders_of("node").items() if source in COMPOSE["volumes"]}
    assert len(named) == len(COMPOSE["volumes"])
    (made,) = re.findall(r"install --directory --owner=tasuki --group=tasuki (.+)", DOCKERFILE)
    assert set(made.split()) == named


def test_both_services_see_the_same_folders_and_the_run_waits_for_the_node():
    assert folders_of("train") == folders_of("node")
    assert SERVICES["train"]["depends_on"]["node"]["condition"] == "service_healthy"


def test_the_cpu_file_takes_from_a_service_what_it_has():
    text = (DEPLOY / "compose.cpu.yaml").read_text()
    assert "!reset" in text
    for name, keys in yaml.safe_load(text.replace("!reset", ""))["services"].items():
        assert keys.keys() <= SERVICES[name].keys()


def test_the_build_takes_the_arguments_that_it_is_given():
    build = SERVICES["node"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert ROOT / build["dockerfile"] == DEPLOY / "Dockerfile"
    assert build["args"].keys() == set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE)) - {"UV_VERSION"}


def test_what_is_copied_exists_and_is_sent_to_the_build():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = [path for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE) for path in line.split()]
    assert sent == set(copied)
    assert all((ROOT / path).exists() for path in copied)


def test_every_link_in_the_sources_leads_to_something_that_is_sent():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] not in "#!*"]
    for folder in ("protos", "services", "client"):
        for link in (path for path in (ROOT / folder / "tasuki").rglob("*") if path.is_symlink()):
            target = link.resolve().relative_to(ROOT)
            assert not any(fnmatch(str(part), pattern) for part in (target, *target.parents) for pattern in ignored)
            assert re.search(rf"^COPY {target.parts[0]} ", DOCKERFILE, re.MULTILINE)


def test_python_and_uv_are_those_of_the_makefile_and_of_pyproject():
    makefile = (ROOT / "Makefile").read_text()
    (range_,) = set(re.findall(r"\((3, \d+)\) <= \S+ <= \((3, \d+)\)", makefile + DOCKERFILE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest, highest = (bound.replace(", ", ".") for bound in range_)
    assert project["requires-python"] == f">={lowest}"
    versions = [found for text in project["classifiers"] if (found := text.rpartition(" :: ")[2])[:2] == "3."]
    assert (versions[0], versions[-1]) == (lowest, highest)
    assert re.findall(r"UV_VERSION=(\S+)", DOCKERFILE) == re.findall(r"UV_VERSION := (\S+)", makefile)


def test_docker_waits_longer_than_an_orderly_stop_takes():
    assert int(SERVICES["node"]["stop_grace_period"].removesuffix("s")) > STOP_TIMEOUT_S


def test_the_page_names_every_variable_of_ours():
    ours = set(re.findall(r"\$\{(TASUKI_\w+)", (DEPLOY / "compose.yaml").read_text()))
    assert set(re.findall(r"`(TASUKI_\w+)`", (ROOT / "docs" / "deploy.md").read_text())) == ours


def test_another_malloc_is_in_the_image_and_preloaded_only_if_it_is_asked_for() -> None:
    base, *_, last = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    assert "libjemalloc2" in base.split()
    lines = [line.strip() for line in last.splitlines()]
    assert lines.index("ARG MALLOC") + 1 == lines.index("ENV LD_PRELOAD=${MALLOC}"), "without a default, so that it is empty"
    assert not any(line.startswith("RUN") for line in lines[lines.index("ARG MALLOC") :]), "nothing of the build is preloaded"
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert "--build-arg MALLOC=libjemalloc.so.2" in page
