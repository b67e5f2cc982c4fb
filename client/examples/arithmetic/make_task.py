"""Make the problems: train.jsonl and eval.jsonl, with two-digit sums or GSM8K. The two files are disjoint."""

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from rewards import final_number

from tasuki.client.dataset import read_objects
from tasuki.wire.errors import InvalidArgument, TasukiError

NUM_EVAL = 256
FINISH = "\nEnd with #### and the number."


def make_sums(folder: Path, *, seed: int) -> None:
    """Write train.jsonl and eval.jsonl. Held-out sums are not in train.jsonl, in either order."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random_ = random.Random(seed)
    random_.shuffle(pairs)
    held_out = [pair if random_.random() < 0.5 else pair[::-1] for pair in pairs[:NUM_EVAL]]
    trained = [order for a, b in pairs[NUM_EVAL:] for order in sorted({(a, b), (b, a)})]
    for name, sums in (("eval", held_out), ("train", trained)):
        write_rows(folder / f"{name}.jsonl", ((f"What is {a} + {b}? Write the equation.", str(a + b)) for a, b in sums))


def make_gsm8k(folder: Path, source: Path) -> None:
    """Write train.jsonl and eval.jsonl from lines of `question` and `answer`; the last ones, at most a tenth, are held out.

    Raises PathNotFound without the file, InvalidArgument naming a line without a question, or without `#### n` in its answer.
    """
    problems = [(_field(row, "question", place) + FINISH, _final(row, place)) for place, row in read_objects(source)]
    if len(problems) < 2:
        raise InvalidArgument("dataset", f"{source}: has {len(problems)} problem; needs one to train on and one to hold out")
    num_eval = min(NUM_EVAL, max(1, len(problems) // 10))
    write_rows(folder / "eval.jsonl", problems[-num_eval:])
    write_rows(folder / "train.jsonl", problems[:-num_eval])


def write_rows(path: Path, problems: Iterable[tuple[str, str]]) -> None:
    rows = ({"prompt": [{"role": "user", "content": question}], "answer": answer} for question, answer in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _field(row: Mapping[str, object], name: str, place: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise InvalidArgument("dataset", f"{place}: lacks `{name}`, a text")
    return value


def _final(row: Mapping[str, object], place: str) -> str:
    number = final_number(_field(row, "answer", place))
    if number is None:
        raise InvalidArgument("dataset", f"{place}: `answer` has no number behind ####")
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="seed of the held-out sums")
    parser.add_argument("--gsm8k", type=Path, help="JSONL of `question` and `answer`, instead of sums")
    arguments = parser.parse_args()
    try:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        if arguments.gsm8k is None:
            make_sums(arguments.folder, seed=arguments.seed)
        else:
            make_gsm8k(arguments.folder, arguments.gsm8k)
    except TasukiError as error:
        parser.exit(2, f"make_task.py: --gsm8k: {error.message}; give a JSONL file of `question` and `answer`\n")
    except OSError as error:
        parser.exit(2, f"make_task.py: folder: {error}; give a folder that can be made or written to\n")
