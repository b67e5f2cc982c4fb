"""Records which of our functions are open in each process when a call is handed on: to a task, a peer, a rank or the native library.

Installed through a sitecustomize.py on PYTHONPATH (walks.py). It imports nothing heavy, since every interpreter runs it.
"""

import asyncio
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

OURS = "/services/tasuki/"
_noted: set[str] = set()
_loops: set[int] = set()


def follow(folder: str) -> None:
    """Appends lines `kind > file:function > ...` to a file of this process in `folder`."""

    def note(kind: str, frame: FrameType | None) -> None:
        functions: list[str] = []
        while frame is not None:
            if OURS in frame.f_code.co_filename:
                functions.insert(0, f"{frame.f_code.co_filename.split(OURS)[1]}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        line = " > ".join([kind, *functions])
        if functions and line not in _noted:
            _noted.add(line)
            with Path(folder, f"{os.getpid()}.stacks").open("a") as file:
                file.write(f"{line}\n")

    def make_task(loop: Any, work: Any, **options: Any) -> asyncio.Task[Any]:
        note("task", sys._getframe(1))
        return asyncio.Task(work, loop=loop, **options)

    def called(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        loop = asyncio._get_running_loop()
        if loop is not None and id(loop) not in _loops:
            _loops.add(id(loop))
            loop.set_task_factory(make_task)
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "__call__" and file.endswith("grpc/aio/_channel.py"):
            note(f"rpc {frame.f_locals['self']._method.decode().rpartition('/')[2]}", frame.f_back)
        elif name == "send_multipart":
            note("ranks", frame.f_back)
        elif name == "call" and file.endswith("memory/arena.py"):
            note(f"pages {frame.f_locals['name']}", frame)
        elif name == "write_published" and file.endswith("weights/weight_arena.py"):
            note("published", frame)

    sys.setprofile(called)
    threading.setprofile(called)
