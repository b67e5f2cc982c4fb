"""Rows of CSV, JSON and parquet files, and columns under other names."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table

from tasuki.client.dataset import read_jsonl, read_objects, row_place
from tasuki.wire.errors import InvalidArgument, NotInstalled

ROWS = [{"prompt": 'say "hi",\nplease', "answer": "ü"}, {"prompt": "1+1=", "answer": "2"}]


def written(folder: Path, suffix: str) -> Path:
    path = folder / f"rows{suffix}"
    match suffix:
        case ".csv":
            path.write_bytes('\ufeffprompt,answer\r\n"say ""hi"",\nplease",ü\r\n\r\n1+1=,2\r\n'.encode())
        case ".json":
            path.write_text(json.dumps(ROWS, indent=1))
        case ".parquet":
            write_table(pyarrow.Table.from_pylist(ROWS), path)
        case _:
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.parametrize("suffix", [".csv", ".json", ".parquet", ".jsonl", ".CSV", ".txt"])
def test_every_kind_of_file_has_the_same_rows(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path, suffix.lower()).rename(tmp_path / f"rows{suffix}")
    assert read_jsonl(path) == ROWS


def test_a_json_file_may_have_a_line_per_object(tmp_path: Path) -> None:
    path = written(tmp_path, ".jsonl").rename(tmp_path / "rows.json")
    assert read_jsonl(path) == ROWS
    assert row_place(path, 1) == f"{path}:2"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", "prompt,answer\n1,2\n3\n", "a.csv:3: has 1 fields, but the header 2"),
        ("a.csv", "prompt,prompt\n1,2\n", "a.csv:1: names a column twice"),
        ("a.csv", 'prompt\n"1\n', "not CSV"),
        ("a.csv", "prompt\n", "a.csv has no rows"),
        ("a.csv", 'prompt\n"[{""role"": ""user"", ""content"": ""hi""}]"\n', "a.csv:2: `prompt` is a chat written as text"),
        ("a.csv", "prompt\n\"[{'content': 'hi', 'role': 'user'}]\"\n", "a.csv:2: `prompt` is a chat written as text"),
        (
            "a.csv",
            "prompt\n\"{'name': 'x', 'content': 'hi', 'role': 'user'}\"\n",
            "a.csv:2: `prompt` is a chat written as text",
        ),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "x", "a": "\xed\xa0\x80"}', "a.jsonl:2: not JSON"),
        ("a.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a.jsonl is a Git LFS pointer"),
        ("a.csv", "question\n1\n", "a.csv:2: lacks `prompt`, has only question; `columns` can name"),
        ("a.csv", b"prompt\na\n\xfc\n", "a.csv:3: not UTF-8; save it as that"),
        ("a.json", '{\n"data": [{"prompt": "x"}]}', "a.json: is an object with data; give a list of rows"),
        ("a.json", '\ufeff[{"prompt": ""}]', "a.json: row 1: `prompt` is empty"),
        (
            "a.json",
            '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a", "weight": 0}]}]}',
            "part with `weight`",
        ),
        ("a.json", '[{"prompt": "x"}, 3]', "a.json: row 2: expected an object, got int"),
        ("a.json", '[{"prompt": "x"}, {"prompt": "\\ud83d"}]', "a.json: row 2: not JSON"),
        ("a.json", '[{"prompt": "x"}', "a.json: not JSON"),
        ("a.json", '[{"prompt": "x", "a": NaN}]', "a.json: row 1: not JSON: NaN is no JSON number"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": "x", "a": [-Infinity]}', "a.jsonl:2: not JSON: -Infinity is no JSON number"),
        ("a.jsonl", '{"prompt": "x", "a": 1e999}', "a.jsonl:1: not JSON: 1e999 is no JSON number"),
        ("a.jsonl", '{"prompt": "x", "a": {"b": 1, "b": 1}}', "a.jsonl:1: not JSON: it has `b` twice; remove one"),
        ("a.parquet", "no parquet at all", "a.parquet: cannot be read as parquet"),
    ],
)
def test_an_unusable_row_is_named_by_its_place(tmp_path: Path, name: str, content: str | bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InvalidArgument) as refused:
        read_jsonl(tmp_path / name)
    assert problem in refused.value.message


@pytest.mark.parametrize("suffix", [".csv", ".json", ".parquet", ".jsonl"])
def test_columns_name_the_fields_and_leave_out_the_rest(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path, suffix)
    assert read_jsonl(path, columns={"prompt": "answer"}) == [{"prompt": "ü"}, {"prompt": "2"}]
    with pytest.raises(InvalidArgument, match="has no column `question`, which `columns` names"):
        read_jsonl(path, columns={"prompt": "answer", "answer": "question"})


@pytest.mark.parametrize("is_call", [False, True])
def test_nulls_that_parquet_fills_in_are_refused_where_a_template_would_write_them(tmp_path: Path, is_call: bool) -> None:
    path = tmp_path / "rows.parquet"

    def row(arguments: dict[str, int]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        given = [{"type": "function", "function": {"name": "f", "parameters": arguments}}]
        return {"prompt": chat} if is_call else {"prompt": "a", "asked": given}

    columns = {"prompt": "prompt"} if is_call else {"prompt": "prompt", "tools": "asked"}
    write_table(pyarrow.Table.from_pylist([row({"x": 1}), row({"x": 2})]), path)
    assert len(read_jsonl(path, columns=columns)) == 2
    write_table(pyarrow.Table.from_pylist([row({"x": 1}), row({"y": 2})]), path)
    with pytest.raises(InvalidArgument, match=r"row 1: `(tools|prompt)` has a null in tools or arguments"):
        read_jsonl(path, columns=columns)


def test_a_parquet_column_that_is_no_json_is_left_out_by_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_table(pyarrow.table({"prompt": ["a"], "image": [b"\x00"]}), path)
    with pytest.raises(InvalidArgument, match=r"row 1: .*name the columns to read in `columns`"):
        read_jsonl(path)
    assert read_jsonl(path, columns={"prompt": "prompt"}) == [{"prompt": "a"}]


def test_parquet_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, ".parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(NotInstalled) as missing:
        list(read_objects(path))
    assert missing.value.metadata["extras"] == "hub"


def test_a_column_that_parquet_has_twice_is_refused(tmp_path: Path) -> None:
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    write_table(pyarrow.Table.from_arrays(columns, ["prompt", "prompt"]), tmp_path / "a.parquet")
    with pytest.raises(InvalidArgument, match=r"a\.parquet: .* it has `prompt` twice"):
        read_jsonl(tmp_path / "a.parquet")
