"""`tasuki doctor`: checks the machine and, given CONFIG, whether its node would run there."""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from tasuki.cli.node_view import print_text
from tasuki.config.load import load_beside_node
from tasuki.config.schema import NodeConfig
from tasuki.doctor.finding import Finding, Verdict, fail, is_running, ok
from tasuki.doctor.host import check_shared_memory, gpu_findings, host_findings, read_gpu_facts, torch_cuda_version
from tasuki.doctor.node import check_passing, fleet_findings, node_findings, running_config
from tasuki.node.model_folder import weights_to_fetch, with_local_files
from tasuki.wire.denied_path import what_to_change
from tasuki.wire.errors import InvalidArgument, PathPermissionDenied, TasukiError

FAILED = 1
_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 if a check fails; warnings do not count. Raises InvalidArgument for a `min_gbit` that cannot be judged."""
    min_gbit = arguments.min_gbit
    if min_gbit is not None and not 0 < min_gbit < math.inf:
        raise InvalidArgument("--min-gbit", f"must be a positive number, got {min_gbit:g}")
    if min_gbit is not None and arguments.config is None:
        raise InvalidArgument("--min-gbit", "needs CONFIG, of a node of a running fleet")
    findings = list(examine(arguments.config, overrides=arguments.overrides, min_gbit=min_gbit))
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    else:
        _show(findings)
    return FAILED if any(finding.verdict is Verdict.FAIL for finding in findings) else 0


def examine(path: Path | None, *, overrides: Sequence[str] = (), min_gbit: float | None = None) -> Iterator[Finding]:
    """Runs every check, in the order of the report. min_gbit: demanded of a fleet's gradients."""
    yield from host_findings()
    config: NodeConfig | None = None
    lacking: dict[str, int] = {}
    if path is not None:
        try:
            given = load_beside_node(path, overrides=overrides)
            config, lacking = with_local_files(given, has_weights=False), weights_to_fetch(given)
            yield ok("configuration", str(path))
        except TasukiError as error:
            yield fail("configuration", f"{error.reason}: {error.message}", _advice(error))
    runs = config is not None and is_running(config)
    facts = read_gpu_facts()
    if facts.driver_cuda is not None or (config is not None and config.device == "cuda"):
        yield from gpu_findings(facts, torch_cuda=torch_cuda_version(), node_runs=runs)
    if path is not None and config is not None:
        yield from node_findings(config, facts.gpus, config_dir=path.resolve().parent, lacking=lacking)
        yield from fleet_findings(running_config(config), min_gbit=min_gbit)
    else:
        yield check_shared_memory()
        yield check_passing("cpu")


def _advice(error: TasukiError) -> str:
    """Advice on a configuration that cannot be loaded."""
    if isinstance(error, PathPermissionDenied):
        return what_to_change(Path(error.metadata["path"]))
    field = error.metadata.get("field")
    if field is None:
        return "give the path of a node's TOML file"
    advice = {"config": "correct the TOML of the file", "set": "give --set A.B=VALUE"}
    return advice.get(field, f"see docs/reference/config.md for {field}")


def _show(findings: Sequence[Finding]) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.found)
        if finding.advice:
            text.append(f"\n-> {finding.advice}", style="dim")
        table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), Text(finding.name), text)
    print_text(table)
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    sys.stdout.write(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + "\n")
