"""Checks of `tasuki doctor` on the memory of a node: its plan, and passing memory between processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from tasuki.config.schema import NodeConfig
from tasuki.doctor.finding import Finding, fail, ok, warn
from tasuki.doctor.gpus import Gpu
from tasuki.memory.host import host_memory
from tasuki.planner.advice import problems
from tasuki.planner.budget import check_host_budget, check_host_ranks
from tasuki.planner.node_plan import check_kv_tokens, plan_node
from tasuki.wire.errors import TasukiError

PROBE = (sys.executable, "-P", "-m", "tasuki.memory.probe")
_PROBE_TIMEOUT_S = 120.0
_NO_GPU = 1


def check_plan(config: NodeConfig, gpus: Sequence[Gpu]) -> Finding:
    """Checks that the plan fits the machine as a whole, and its tags the budget, if there is one."""
    name = "memory plan"
    if config.device == "cuda" and not gpus:
        return warn(name, "not made: no GPU is visible from here", "tasuki plan CONFIG --gpu-gb SIZE")
    gpu_bytes = min((gpu.total_bytes for gpu in gpus), default=_NO_GPU)
    try:
        check_host_ranks(config)
        check_host_budget(config)
        planned = plan_node(config, gpu_bytes=gpu_bytes, host_bytes=host_memory().total_bytes)
        check_kv_tokens(planned.layout, config)
    except TasukiError as error:
        return fail(name, error.message, f"change {error.metadata.get('field', 'the configuration')}")
    if not planned.fits:
        return fail(name, "; ".join(problems(planned)), "run tasuki plan CONFIG to see what to change")
    available = host_memory().available_bytes
    if planned.host_peak.host_bytes > available:
        text = f"needs {planned.host_peak.host_bytes / 1e9:.1f} GB of host memory, {available / 1e9:.1f} GB are free now"
        return warn(name, text, "end other programs on the machine")
    return ok(name, f"fits; {planned.kv_pool.num_tokens:,} tokens of KV cache")


def check_passing(device: str, *, probe: Sequence[str] = PROBE) -> Finding:
    """Checks that memory passes between processes by file descriptor, as weights do. probe: command that tries it."""
    name = f"memory between processes, {device}"
    try:
        done = subprocess.run([*probe, device], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return fail(name, str(error), "run it separately: python -m tasuki.memory.probe " + device)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        advice = "run trainer and rollout in one container with the same GPUs"
        return fail(name, said, advice if device != "cpu" else "allow memfd_create and descriptors over sockets")
    return ok(name, "2 MiB written by one process were read by another")
