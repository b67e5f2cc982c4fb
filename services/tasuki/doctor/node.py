"""Checks of `tasuki doctor CONFIG` beyond the machine: whether this node would start and fit, and pass memory between processes."""

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tasuki.client.dataset import Row, read_jsonl
from tasuki.config.load import SLOW_BFLOAT16, slow_dtypes
from tasuki.config.paths import readable_by_others
from tasuki.config.schema import NodeConfig, SftConfig, TrainConfig
from tasuki.doctor.finding import Finding, Verdict, certificate_findings, checked, fail, is_running, ok, warn
from tasuki.doctor.host import Gpu, check_disk, check_port, check_shared_memory
from tasuki.memory.host import host_memory
from tasuki.models.tokenizer import check_tokenizer
from tasuki.node.choose import check_host_budget, check_host_ranks
from tasuki.node.model_folder import check_model_folders
from tasuki.node.start import check_node_installed, check_place, check_state_folder
from tasuki.planner.choose import plan_node
from tasuki.planner.node import node_of
from tasuki.planner.trainer_bytes import run_disk
from tasuki.rpc.logs import check_telemetry
from tasuki.rpc.port import check_ports
from tasuki.runs.earlier_run import reward_folders
from tasuki.runs.rl_training import RlTraining, open_rewards, read_rl, reward_functions
from tasuki.runs.sft_training import SftTraining, read_sft
from tasuki.trackers.adapters import check_installed
from tasuki.trainer.backends import megatron
from tasuki.wire.address import split_host_port
from tasuki.wire.denied_path import denied
from tasuki.wire.errors import TasukiError


def node_findings(
    config: NodeConfig, gpus: Sequence[Gpu], *, config_dir: Path, lacking: Mapping[str, int]
) -> Iterable[Finding]:
    """config_dir: of the configuration's file, where rewards are searched. lacking: bytes of weights to fetch from the hub, by key."""
    runs = is_running(config)
    if told := readable_by_others(config.state_dir):
        yield warn("state_dir of others", told, "names and sizes of its files tell of the run")
    yield ok("node", f"runs in {config.state_dir}") if runs else ok("node", "is not running")
    if not runs:
        yield checked("packages of a node", "installed", check_node_installed, key="the environment")
        yield checked("state_dir", str(config.state_dir), lambda: check_state_folder(config), key="state_dir")
    if slow := slow_dtypes(config):
        yield warn("dtypes", f'{" and ".join(slow)} = "bfloat16": {SLOW_BFLOAT16}', "remove the keys")
    if lacking:
        sizes = ", ".join(f"{key}: {num_bytes / 1e9:.2f} GB of weights are not here yet" for key, num_bytes in lacking.items())
        model = warn("model", sizes, "tasuki up and tasuki train fetch them first, into the hub's cache")
    else:
        model = checked("model", str(config.model.path), lambda: check_model_folders(config), key="model.path")
    yield model
    if model.verdict is Verdict.OK:
        yield from (
            warn("tokenizer", doubt, "take the tokenizer that belongs to the model")
            for doubt in check_tokenizer(config.model.path)
        )
    has_port = bool(config.port_targets or config.metrics.listen)
    secured = "TLS" if config.security.cert is not None else "loopback without TLS"
    security = checked("security", secured if has_port else "unix sockets only", lambda: check_ports(config), key="[security]")
    yield security
    if security.verdict is Verdict.OK:
        yield from certificate_findings(config)
    if config.fleet is not None and not runs:
        yield checked("place in the fleet", config.fleet.leader, lambda: check_place(config), key="fleet")
    yield checked("tracing", "as the environment says", check_telemetry, key="the environment")

    if config.trainer.backend == "megatron":
        yield checked("backend", f"megatron-core {megatron.VERSION}", megatron.check_installed, key="trainer.backend")

    def check_trackers() -> None:
        for name in config.track.to:
            check_installed(name, key="track.to")

    yield checked("trackers", ", ".join(config.track.to) or "none", check_trackers, key="track.to")
    has_model = model.verdict is not Verdict.FAIL
    if has_model:
        settings = checked(
            "settings", "fit the model", lambda: node_of(config, gpu_bytes=1, host_bytes=1), key="the configuration"
        )
        has_model = settings.verdict is Verdict.OK
        yield settings
    yield from check_datasets(config, has_model=model.verdict is Verdict.OK)
    if config.train is not None:
        yield check_rewards(config.train, reward_folders(config_dir))
    if has_model:
        yield check_plan(config, gpus, free_bytes=host_memory().total_bytes if runs else host_memory().available_bytes)
    yield check_shared_memory(num_ranks=max(config.trainer.num_ranks, config.num_engine_ranks))
    yield check_passing("cpu")
    if config.device == "cuda" and gpus and not runs:
        yield check_passing("cuda:0")
    num_checkpoints, needed = run_disk(node_of(config, gpu_bytes=1, host_bytes=1)) if has_model else (0, 0)
    folders = {"state_dir": config.state_dir}
    folders |= {} if config.train is None else {"train.output_dir": config.train.output_dir}
    folders |= {} if config.sft is None else {"sft.output_dir": config.sft.output_dir}
    for key, folder in folders.items():
        num_bytes = 0 if key == "state_dir" else needed
        yield check_disk(key, folder, needed_bytes=num_bytes, what=f"{num_checkpoints} checkpoints and the model")
    ports = {f"listen ({service})": target for service, target in config.port_targets.items()}
    ports |= {} if config.metrics.listen is None else {"metrics.listen": config.metrics.listen}
    for key, target in ports.items() if not runs else ():
        yield check_port(key, *split_host_port(target))


_COMPARE = "compare the chat template with eos_token_id of generation_config.json, and with the tools of episodes"


def check_datasets(config: NodeConfig, *, has_model: bool) -> Iterable[Finding]:
    """Checks that a run could start with its data, using the model's tokenizer as `tasuki train` does before its first step."""
    if config.train is not None:
        yield from _check_data("train", config.train, (lambda: read_rl(config)) if has_model else None)
    if (sft := config.sft) is not None:
        yield from _check_data("sft", sft, (lambda: read_sft(config, sft)) if has_model else None)


def _check_data(
    table: str, run: TrainConfig | SftConfig, read: Callable[[], RlTraining | SftTraining] | None
) -> Iterable[Finding]:
    """read: None without a tokenizer."""
    name = f"data of [{table}]"
    for key, path in ((f"{table}.dataset", run.dataset), (f"{table}.eval_dataset", run.eval_dataset)):
        if path is None:
            continue
        try:
            if not path.is_file():
                yield fail(name, f"{path} is not a file", f"change {key}")
                return
        except PermissionError:
            error = denied(path, key=key)
            yield fail(name, f"{error.reason}: {error.message}", f"change {key}, or the permissions")
            return
    if read is None:
        yield ok(name, f"{run.dataset}; rows not checked without the model")
        return
    found: list[RlTraining | SftTraining] = []
    yield checked(name, str(run.dataset), lambda: found.append(read()), key=f"{table}.dataset")
    for training in found:
        yield from (warn(f"completions of [{table}]", doubt, _COMPARE) for doubt in training.doubts)


def check_rewards(train: TrainConfig, folders: Sequence[Path]) -> Finding:
    """Imports the functions of rewards or episodes in a worker process and compares them with the rows, as `tasuki train` does."""
    key, functions = reward_functions(train)

    def check() -> None:
        rows, eval_rows = (_readable_rows(path, train) for path in (train.dataset, train.eval_dataset))
        open_rewards(train, folders, rows, eval_rows).close()

    return checked(f"{key.partition('.')[2]} of [train]", ", ".join(functions), check, key=key)


def _readable_rows(path: Path | None, train: TrainConfig) -> list[Row]:
    """Rows of a dataset; none if it cannot be read, which its own check tells."""
    with suppress(TasukiError):
        return [] if path is None else read_jsonl(path, columns=train.columns)
    return []


PROBE = (sys.executable, "-P", "-m", "tasuki.memory.shared_chunks")
_PROBE_TIMEOUT_S = 120.0
_NO_GPU = 1


def check_plan(config: NodeConfig, gpus: Sequence[Gpu], *, free_bytes: int) -> Finding:
    """Checks that the plan fits the machine as a whole, and its tags the budget, if there is one.

    free_bytes: of the host's memory, with what the node itself holds if it runs.
    """
    name = "memory plan"
    if config.device == "cuda" and not gpus:
        return warn(name, "not made: no GPU is visible from here", "tasuki plan CONFIG --gpu-gb SIZE")
    gpu_bytes = min((gpu.total_bytes for gpu in gpus), default=_NO_GPU)
    try:
        check_host_ranks(config)
        check_host_budget(config)
        planned = plan_node(config, gpu_bytes=gpu_bytes, host_bytes=host_memory().total_bytes)
    except TasukiError as error:
        return fail(name, error.message, f"change {error.metadata.get('field', 'the configuration')}")
    if not planned.fits:
        return fail(name, "; ".join(planned.problems()), "run tasuki plan CONFIG to see what to change")
    if planned.host_peak.host_bytes > free_bytes:
        text = f"needs {planned.host_peak.host_bytes / 1e9:.1f} GB of host memory, {free_bytes / 1e9:.1f} GB are free now"
        return warn(name, text, "end other programs on the machine")
    return ok(name, f"fits; {planned.kv_pool.num_tokens:,} tokens of KV cache")


def check_passing(device: str, *, probe: Sequence[str] = PROBE) -> Finding:
    """Checks that memory passes between processes by file descriptor, as weights do. probe: command that tries it."""
    name = f"memory between processes, {device}"
    try:
        done = subprocess.run([*probe, device], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return fail(name, str(error), "run it separately: python -m tasuki.memory.shared_chunks " + device)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        advice = "run trainer and rollout in one container with the same GPUs"
        return fail(name, said, advice if device != "cpu" else "allow memfd_create and descriptors over sockets")
    return ok(name, "2 MiB written by one process were read by another")
