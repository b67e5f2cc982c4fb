"""`tasuki init`: writes a configuration, a reward and, without data, a sample of it, for a model and a machine."""

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tasuki.cli.arguments import DEFAULT_HOST_GB
from tasuki.cli.plan import verdict
from tasuki.cli.train import check_data
from tasuki.client.dataset import read_objects
from tasuki.config.gpus import smallest_gpu_bytes
from tasuki.config.load import config_of, is_hub_dataset, leaves, load_config, put, value_at
from tasuki.memory.host import host_memory
from tasuki.models.tokenizer import read_tokenizer
from tasuki.node.model_folder import check_model_folder, with_local_files
from tasuki.planner.advice import advise
from tasuki.planner.choose import choose
from tasuki.planner.node import GB, Node, node_of
from tasuki.planner.plan import Plan, plan
from tasuki.wire.errors import InvalidArgument, PathExists, PathNotFound

TASKS = ("math", "match", "sft")
DEVICES = ("cuda", "cpu")
_LONGEST_PROMPT, _NUM_SAMPLES = 512, 64
_MATCH = '''"""Reward: whether the completion is the row's `answer`."""


def exact(completion: str, answer: str) -> float:
    return float(completion.strip() == str(answer).strip())
'''
_HEAD = "# docs/reference/config.md has every key. Relative paths are relative to this file.\n"


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 if the node does not fit whatever changes. Raises PathExists for a file that is there, and InvalidArgument."""
    folder: Path = arguments.folder
    model = _asked(arguments.model, "model", "Model: a Hugging Face folder, or an id of the hub")
    task = _asked(arguments.task, "task", f"Task: {', '.join(TASKS)}", choices=TASKS, default="math")
    usual = "cuda" if smallest_gpu_bytes() else "cpu"
    device = _asked(arguments.device, "device", "Device: cuda or cpu", choices=DEVICES, default=usual)
    gpu_gb = None if device == "cpu" else _gpu_gb(arguments)
    data = arguments.data
    if data is None and arguments.model is None:
        data = _answer("Data: a file, or an id of the hub (none: a sample): ", flag="data") or None
    if data is not None and not Path(data).is_file() and not is_hub_dataset(data):
        raise PathNotFound(f"data: {data} is not a file; give one, an id of the hub, or none for a sample", path=Path(data))
    planned, table = _fitting(_tables(model, task=task, device=device, data=data), gpu_gb=gpu_gb)
    is_sft, is_chat = task == "sft", bool(read_tokenizer(planned.node.config.model.path).templates)
    settings = planned.node.config.train or planned.node.config.sft
    assert settings is not None
    rows = (
        _sample(is_sft=is_sft, is_chat=is_chat)
        if data is None
        else _of_questions(settings.dataset, is_sft=is_sft, is_chat=is_chat)
    )
    if rows is not None:
        table["sft" if is_sft else "train"]["dataset"] = "train.jsonl"
    files = {"node.toml": _HEAD + _toml(table, _advice(planned, table))}
    if not is_sft:
        math = resources.files("tasuki.cli").joinpath("math_rewards.py")
        files["rewards.py"] = _MATCH if task == "match" else math.read_text()
    if rows is not None:
        files["train.jsonl"] = rows
    is_new = not folder.exists()
    _write(folder, files)
    config = folder / "node.toml"
    try:
        check_data(with_local_files(load_config(config), has_weights=False), config_dir=folder)
    except BaseException:
        for name in files:
            (folder / name).unlink()
        if is_new:
            shutil.rmtree(folder)
        raise
    lines = verdict(planned, advise(planned))
    name = shlex.quote(str(config))
    steps = [f"tasuki doctor {name}", f"tasuki train {name}", f"tasuki dashboard {shlex.quote(str(folder / 'run'))}"]
    of_data = [f"train.jsonl has the questions of {data}{', as chats' if is_chat else ''}"] if data and rows else []
    told = [f"wrote {', '.join(files)} to {folder}", *of_data, *lines, "Next:", *(f"  {step}" for step in steps)]
    sys.stdout.write("\n".join(told) + "\n")
    return 0 if planned.fits else 1


def _asked(given: str | None, flag: str, question: str, *, choices: tuple[str, ...] = (), default: str = "") -> str:
    while not given:
        if not sys.stdin.isatty():
            known = f" {{{','.join(choices)}}}" if choices else ""
            raise InvalidArgument(f"--{flag}", f"give --{flag}{known}: there is no terminal to ask on")
        answer = _answer(f"{question}{f' [{default}]' if default else ''}: ", flag=flag) or default
        given = answer if answer in choices or not choices else None
        if not given:
            sys.stdout.write(f"{answer!r} is not {' or '.join(choices) or 'an answer'}\n")
    return given


def _answer(question: str, *, flag: str) -> str:
    try:
        return input(question).strip()
    except (EOFError, KeyboardInterrupt) as error:
        sys.stdout.write("\n")
        if isinstance(error, KeyboardInterrupt):
            raise
        raise InvalidArgument(f"--{flag}", f"the input ended before an answer; give --{flag}") from None


def _gpu_gb(arguments: argparse.Namespace) -> float:
    """GB of a GPU: the flag's, this machine's, or the answer."""
    found = smallest_gpu_bytes() if arguments.gpu_memory_gb is None else None
    text = str(arguments.gpu_memory_gb) if found is None and arguments.gpu_memory_gb is not None else None
    text = f"{found / GB:.1f}" if found is not None else _asked(text, "gpu-memory-gb", "Memory of the GPU in GB, such as 24")
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 1 <= size <= 10_000:
        raise InvalidArgument("--gpu-memory-gb", f"must be the memory of a GPU in GB, such as 24, not {text}")
    return size


def _tables(model: str, *, task: str, device: str, data: str | None) -> dict[str, Any]:
    """A small run of the task, with lengths that the model can have. Paths are as node.toml has them."""
    if is_folder := Path(model).is_dir():
        check_model_folder(Path(model))
    dataset = "train.jsonl" if data is None else str(Path(data).resolve()) if Path(data).is_file() else data
    is_cpu, table = device == "cpu", {"state_dir": "node", "device": device}
    table |= {"model": {"path": str(Path(model).resolve()) if is_folder else model}}
    table |= {"trainer": {"learning_rate": 1e-5 if task == "sft" else 1e-6}, "rollout": {}}
    if task == "sft":
        sft = {"dataset": dataset, "output_dir": "run", "num_epochs": 3, "samples_per_step": 8 if is_cpu else 32}
        return table | {"sft": sft}
    longest = _node(table, gpu_gb=1.0).longest_sequence
    prompt = min(_LONGEST_PROMPT, longest // 2)
    train = {"dataset": dataset, "output_dir": "run", "num_steps": 20 if is_cpu else 200}
    train |= {"prompts_per_step": 8 if is_cpu else 32, "group_size": 8, "max_prompt_tokens": prompt}
    train |= {"max_new_tokens": min(128 if is_cpu else 1024, longest - prompt), "save_every": 10 if is_cpu else 20}
    return table | {"train": train | {"reward": {"function": "rewards:exact" if task == "match" else "rewards:correct"}}}


def _node(table: Mapping[str, Any], *, gpu_gb: float | None) -> Node:
    config = with_local_files(config_of(json.loads(json.dumps(table))), has_weights=False)
    host_bytes = host_memory().total_bytes if config.device == "cpu" else DEFAULT_HOST_GB * GB
    return node_of(config, gpu_bytes=int((gpu_gb or 1.0) * GB), host_bytes=int(host_bytes))


def _fitting(table: dict[str, Any], *, gpu_gb: float | None) -> tuple[Plan, dict[str, Any]]:
    planned = plan(choose(_node(table, gpu_gb=gpu_gb)))
    for rung in advise(planned).ladder:
        put(table, rung.setting, value_at(rung.plan.node.config, rung.setting))
        planned = rung.plan
    if planned.node.lora is not None:
        table["trainer"]["learning_rate"] = 1e-4 if "sft" in table else 1e-5
    elif "train" in table and planned.node.model.num_parameters < 1e9:
        table["trainer"]["learning_rate"] = 3e-5
    if "micro_batch_tokens" not in table["trainer"]:  # a comment: each start plans it
        table["trainer"]["# micro_batch_tokens"] = planned.node.micro_batch_tokens
    return planned, table


def _advice(planned: Plan, table: Mapping[str, Any]) -> dict[str, str]:
    """Key -> why it has its value and what to try."""
    if planned.node.lora is not None:
        rate = "adapters bear ten times the rate of full training"
    elif "sft" in table:
        rate = "full training; ten times that with [trainer.lora]"
    else:
        rate = "full training: 3e-5 below 1B parameters, 1e-6 above; ten times that with [trainer.lora]"
    return {
        "learning_rate": f"{rate}; lower it if the curve falls or jumps",
        "micro_batch_tokens": "bounds memory, not the result; halve it if memory runs out",
        "# micro_batch_tokens": "the planner's choice here; set half of it if memory runs out",
    }


def _toml(table: Mapping[str, Any], advice: Mapping[str, str]) -> str:
    rest = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in rest.items()]
    for name, keys in table.items():
        if isinstance(keys, dict) and keys:
            lines += ["", f"[{name}]"]
            for key, value in leaves(keys):
                lines.append(f"{key} = {json.dumps(value)}" + (f"  # {advice[key]}" if key in advice else ""))
    return "\n".join(lines) + "\n"


def _sample(*, is_sft: bool, is_chat: bool) -> str:
    """Rows of sums: to be replaced by the user's own."""
    asked = " ? Answer with the number only." if is_chat else ""
    sums = [(11 + 7 * number % 89, 13 + 5 * number % 87) for number in range(_NUM_SAMPLES)]
    return _rows([(f"{one} + {other} ={asked}", str(one + other)) for one, other in sums], is_sft=is_sft, is_chat=is_chat)


def _of_questions(dataset: Path, *, is_sft: bool, is_chat: bool) -> str | None:
    """Rows as a run takes them, of questions and answers, such as GSM8K's; None for another dataset."""
    rows = [row for _, row in read_objects(dataset)]
    asked = next((name for name in ("question", "problem") if name in rows[0]), None)
    answered = next((name for name in ("solution", "answer")[:: 1 if is_sft else -1] if name in rows[0]), None)
    if asked is None or answered is None or "prompt" in rows[0] or "messages" in rows[0]:
        return None
    return _rows([(row.get(asked), row.get(answered)) for row in rows], is_sft=is_sft, is_chat=is_chat)


def _rows(pairs: Sequence[tuple[object, object]], *, is_sft: bool, is_chat: bool) -> str:
    """JSON lines of questions with their answers, as chats for a model with a template."""
    answered = "completion" if is_sft else "answer"
    prompts = ([{"role": "user", "content": question}] if is_chat else question for question, _ in pairs)
    rows = [{"prompt": prompt, answered: answer} for prompt, (_, answer) in zip(prompts, pairs, strict=True)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Raises PathExists before anything is written."""
    for name in files:
        if (folder / name).exists():
            raise PathExists(f"{folder / name} is there already; give a new folder", path=folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        with (folder / name).open("x") as file:
            file.write(text)
