"""FlashAttention-4's private functions, whose kernels run on GPUs alone: a test fails where a version changes what we call."""

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasuki.trainer.attention import flash

FOUND = find_spec("flash_attn")
needs_flash_attention = pytest.mark.skipif(FOUND is None, reason="flash-attn-4 is not installed")


def function(name: str) -> ast.FunctionDef:
    """Reads the source, since an import compiles for seconds."""
    assert FOUND is not None and FOUND.submodule_search_locations is not None
    tree = ast.parse(Path(FOUND.submodule_search_locations[0], "cute", "interface.py").read_text())
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


@needs_flash_attention
@pytest.mark.parametrize(("name", "returned"), [("_flash_attn_fwd", ["out", "lse"]), ("_flash_attn_bwd", ["dq", "dk", "dv"])])
def test_calls_fit_the_installed_version(name: str, returned: list[str]) -> None:
    theirs = function(name)
    parameters = [one.arg for one in theirs.args.args]
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(flash))) if isinstance(node, ast.Call)]
    ours = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]
    (call,) = ours
    positional = parameters[: len(call.args)]
    assert positional == {"_flash_attn_fwd": ["q", "k", "v"], "_flash_attn_bwd": ["q", "k", "v", "out", "dout", "lse"]}[name]
    assert {one.arg for one in call.keywords} <= set(parameters)
    (last,) = (node for node in theirs.body if isinstance(node, ast.Return))
    assert isinstance(last.value, ast.Tuple)
    values = [one.id for one in last.value.elts if isinstance(one, ast.Name)]
    assert values[: len(returned)] == returned
