"""Text for people: the user's line behind a graph node, the first line of an error, graph source.

Directories are removed from the comments in graph source. The text is stored in bundles and must
not depend on where the model's files are.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType

from torch.fx import GraphModule, Node

from ...torch_compat.basics.frames import is_torch_file, is_user_file

_ROOT = Path(__file__).parents[2]
_PARTS = ("compile", "runtime", "torch_compat", "tools/bisect")
_OURS = tuple(f"{_ROOT / part}{os.sep}" for part in _PARTS)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_PLACE = re.compile(r"# File: (?:[^:\n]*/)?([^/:\n]+:\d+)")
_STATED = re.compile(r"# (?:File: )?(\S+:\d+) in ")


def node_location(node: Node) -> str | None:
    """file:line of the innermost frame outside torch; None without a stack."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    users = [frame for frame in frames if not is_torch_file(frame[0])]
    return ":".join((users or frames)[-1]) if frames else None


def short_location(where: str | None) -> str | None:
    """A location with the last three parts of its path, as it is stored in bundles."""
    return where and "/".join(where.split("/")[-3:])


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its class if it has none.

    After a failed C++ compile it is followed by the first error that the compiler printed: torch
    puts it last, after a command of thousands of characters.
    """
    text = str(error).strip() or type(error).__name__
    first, _, rest = text.partition("\n")
    printed = rest.partition("Output:\n")[2].splitlines()
    compiler = next((line.strip() for line in printed if "error:" in line), "")
    return f"{first.strip()}: {compiler}" if compiler else first.strip()


def handled(error: Exception) -> str:
    """Class and first line of an error that goes no further; its frames are dropped.

    An op may keep the error that it raises, whose frames hold the model and what its callers hold.
    """
    text = f"{type(error).__name__}: {first_line(error)}"
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return text


def graph_source(graph: GraphModule) -> str:
    """`graph` as Python source with dtypes, shapes and the user's lines as comments."""
    return _PLACE.sub(r"# \1", graph.print_readable(print_output=False))


def lines_of(text: str) -> Iterator[tuple[str, str | None]]:
    """Each line of a piece's annotated source, and the user's line that it belongs to."""
    place = None
    for line in text.splitlines():
        if match := _STATED.search(line):
            place = match[1]
        yield line, place


def op_line(text: str, op: re.Pattern[str]) -> str | None:
    """The user's line of the first match of `op` in a piece's annotated source."""
    code = ((line, place) for line, place in lines_of(text) if not _STATED.search(line))
    return next((place for line, place in code if place and op.search(line)), None)


def user_line() -> str | None:
    """file:line of the innermost frame outside of torch, Python and this package; None in generated
    code of a piece, whose callers did not cause what it does."""
    return _innermost(traceback.walk_stack(sys._getframe()))


def error_line(error: BaseException) -> str | None:
    """As `user_line`, of the code that raised `error`."""
    return _innermost(reversed(list(traceback.walk_tb(error.__traceback__))))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    in_piece = False
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith("<eval_with_key>"):
            in_piece = True
        elif file.endswith("/_dynamo/eval_frame.py"):
            in_piece = False  # but a region that the model compiles itself
        if _is_of_user(file):
            return None if in_piece else f"{file}:{line}"
    return None


@cache
def _is_of_user(file: str) -> bool:
    return not file.startswith(_OURS) and is_user_file(file) and os.path.isfile(file)
