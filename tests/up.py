"""`tasuki up` with some choices of the planner replaced: CHOICES='{"rollout": []}' python -m tests.up up CONFIG ..."""

import json
import os
import sys
from typing import Any

from tasuki.cli.__main__ import main
from tasuki.config.choices import Choices
from tasuki.node import choose, start

VARIABLE = "CHOICES"


def _choose(*args: Any, **settings: Any) -> Choices:
    return Choices.model_validate({**choose.choose(*args, **settings).model_dump(), **json.loads(os.environ[VARIABLE])})


if __name__ == "__main__":
    start.choose = _choose
    sys.exit(main(sys.argv[1:]))
