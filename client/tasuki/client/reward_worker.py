"""Code run in a reward's worker process: imports the user's functions and calls them."""

import fcntl
import functools
import importlib
import inspect
import json
import math
import numbers
import os
import re
import resource
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple, NoReturn

import numpy as np

Source = tuple[str, str, tuple[str, ...]]
"""Module, function, and folders searched before the installed packages."""
Answer = tuple[float, str]
"""Reward and an empty string, or NaN and the error's text. Exceptions are not passed: their class may not exist in the client."""
LARGEST_REWARD = 1e15
"""Advantages and their squares, summed over a batch, stay finite in float32."""
_TOLD_CHARACTERS = 1000
_TOKEN_IDS = ("prompt_token_ids", "completion_token_ids")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_HIGH_FD = 512
_encode = json.JSONEncoder().encode
"""As it was before the user's code could replace it."""
_worker_pid: int | None = None


class Signature(NamedTuple):
    """What a function takes. As JSON, part of a worker's first message."""

    problem: str = ""
    """Why the function is unusable, or an empty string."""
    taken: Sequence[str] | None = None
    """Names of its parameters; None if it takes any."""
    required: Sequence[str] = ()
    """Those without a default."""
    file: str = ""
    scope: Literal["completion", "group", "batch"] = "completion"
    """What one call scores. A function that takes `completions` scores a group, or with `prompts` the batch."""
    rewards_turns: bool = False
    """Whether an episode's function calls `policy.reward`; not known of what it calls."""


def is_worker() -> bool:
    """Whether this process scores for a pool. A script that has no guard around its pool is imported here."""
    return _worker_pid is not None


def serve(connection_fd: int) -> NoReturn:
    """Tells the signatures of the functions and the process's id, then makes one call after another, until the client has ended."""
    connection = become_worker(connection_fd)
    sources: list[Source] = connection.recv()
    send_answer(connection, [[read_signature(*source) for source in sources], os.getpid()])
    while True:
        try:
            call = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        send_answer(connection, score(*call))


def become_worker(connection_fd: int) -> Connection:
    """Makes this process a worker. Returns its connection to the client."""
    global _worker_pid
    _worker_pid = os.getpid()
    # Files that a reward opens after it has closed all low descriptors must not take the connection's number.
    high = min(_HIGH_FD, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    connection = Connection(fcntl.fcntl(connection_fd, fcntl.F_DUPFD_CLOEXEC, high))
    os.close(connection_fd)
    return connection


def send_answer(connection: Connection, answer: object) -> None:
    """Sends JSON to the client. Ends the process if the client is gone."""
    if os.getpid() != _worker_pid:  # a fork that has returned from the user's code, too
        os._exit(0)
    try:
        connection.send_bytes(_encode(answer).encode())
    except OSError:  # the client is gone
        os._exit(0)


def read_signature(*source: *Source, is_async: bool = False) -> Signature:
    """What a function takes. is_async: whether it must be `async def`, as an episode's; a reward's must not."""
    try:
        function = load_function(*source)
        parameters = inspect.signature(function).parameters.values()
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's module may raise anything
        return Signature(told(error))
    if inspect.isclass(function) and not is_async:
        return Signature("it is a class, whose call makes an object; a reward is a function that returns a number")
    called = function if inspect.isroutine(function) else type(function).__call__
    if is_async and not inspect.iscoroutinefunction(called):
        return Signature("it is not `async def`, as the function of an episode is")
    if not is_async and any(
        inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one) or inspect.isgeneratorfunction(one)
        for one in (function, called)
    ):
        return Signature("it is asynchronous or a generator; a reward returns a number")
    required = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    for parameter in required:
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            return Signature(f"it takes `{parameter.name}` by position only; arguments are passed by name")
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    names = [parameter.name for parameter in parameters if parameter.kind in _NAMED]
    file = getattr(sys.modules[source[0]], "__file__", None) or source[0]
    scope = "completion" if "completions" not in names else "batch" if "prompts" in names else "group"
    for one, several in (("completion", "completions"), ("prompt", "prompts")):
        if one in names and several in names:
            return Signature(f"it takes both `{one}` and `{several}`; take one of them")
    if is_async and not takes_any and "policy" not in names:
        return Signature("it does not take `policy`")
    needed = [parameter.name for parameter in required if parameter.kind in _NAMED]
    try:
        rewards_turns = is_async and re.search(r"\bpolicy\.reward\(", inspect.getsource(called)) is not None
    except (OSError, TypeError):  # it has no source
        rewards_turns = False
    return Signature("", None if takes_any else names, needed, file, scope, rewards_turns)


def score(source: Source, arguments: dict[str, object], num_completions: int | None) -> list[Answer]:
    """Calls the function, for one completion if `num_completions` is None. Returns an answer for each, or one failure for all."""
    try:
        returned = load_function(*source)(**{name: _plain(name, value) for name, value in arguments.items()})
        if num_completions is None:
            return [checked_reward(returned)]
        rewards = getattr(returned, "tolist", lambda: returned)()
        if not isinstance(rewards, list | tuple):
            return [(math.nan, f"returned {type(returned).__name__}, not a list of {num_completions} rewards")]
        if len(rewards) != num_completions:
            return [(math.nan, f"returned {len(rewards)} rewards for {num_completions} completions")]
        return [checked_reward(reward) for reward in rewards]
    except BaseException as error:  # noqa: BLE001  the user's function may raise anything
        return [(math.nan, f"raised {told(error)}")]


def checked_reward(reward: object) -> Answer:
    """The answer for what a function returned."""
    if not isinstance(reward, numbers.Real | np.bool_):
        return math.nan, f"returned {type(reward).__name__}, not a number"
    try:
        value = float(reward)
    except OverflowError:  # of a whole number
        value = math.inf
    if not math.isfinite(value):
        return math.nan, f"returned {value}, which is not finite"
    if abs(value) > LARGEST_REWARD:
        return math.nan, f"returned {value}, which is beyond {LARGEST_REWARD:g}"
    return value, ""


def judged(value: object, cause: object) -> Answer:
    """A worker's answer as the client takes it: the user's code may have replaced what the worker judges with."""
    return (math.nan, str(cause)) if cause else checked_reward(value)


def told(error: BaseException) -> str:
    """The error as one printable line of bounded length; model output may be in its text."""
    try:
        text = str(error)
    except Exception as another:  # noqa: BLE001  so may its own text
        text = f"its text raised {type(another).__name__}"
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:_TOLD_CHARACTERS])
    return f"{type(error).__name__}: {shown}{'...' if len(text) > _TOLD_CHARACTERS else ''}"


@functools.cache
def load_function(module: str, name: str, folders: tuple[str, ...]) -> Callable[..., object]:
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{module}:{name} is {type(function).__name__}, not a function")
    return function


def _plain(name: str, value: object) -> object:
    """Converts token ids to lists."""
    if name in _TOKEN_IDS and isinstance(value, list):
        return [_plain(name, one) for one in value]
    return value.tolist() if name in _TOKEN_IDS and isinstance(value, np.ndarray) else value
