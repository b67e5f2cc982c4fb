"""python tools/compat_requirements.py: our requirements for `make compat`, but for those whose versions SGLang chooses."""

import re
import tomllib
from pathlib import Path

_OF_SGLANG = {"flash-attn-4", "sglang", "torch", "transformers"}

settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
extras = settings["project"]["optional-dependencies"]
for requirement in (
    settings["project"]["dependencies"] + extras["rollout"] + extras["trainer"] + settings["dependency-groups"]["dev"]
):
    if re.split(r"[^\w.-]", requirement)[0] not in _OF_SGLANG:
        print(requirement)
