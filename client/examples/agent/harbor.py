"""An agent for tasks in Harbor's form, judged by their own tests: reward.txt, or the exit code. Copy it, and change the agent.

The dataset line names the folder of a task: task.toml, instruction.md, tests/test.sh. The answer becomes answer.txt there.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from shutil import copytree
from typing import Any

from openai import OpenAI

with tempfile.TemporaryDirectory() as folder:
    task = Path(copytree(json.load(sys.stdin)["task"], f"{folder}/task"))
    limits, logs = tomllib.loads((task / "task.toml").read_text()), Path(folder)
    instruction: Any = [{"role": "user", "content": (task / "instruction.md").read_text()}]
    reply = OpenAI(timeout=limits["agent"]["timeout_sec"]).chat.completions.create(model="any", messages=instruction)
    (task / "answer.txt").write_text(reply.choices[0].message.content or "")
    tests = ["env", f"LOGS={folder}", "bash", "tests/test.sh"]
    seconds = limits["verifier"]["timeout_sec"]
    passed = subprocess.run(tests, cwd=task, stdout=sys.stderr, timeout=seconds).returncode == 0
    reward = logs / "reward.txt"
    print(reward.read_text() if reward.exists() else float(passed))
