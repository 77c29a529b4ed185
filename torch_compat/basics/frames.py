"""Where code belongs: to torch, to Python's standard library, or to the user."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
STDLIB = sysconfig.get_path("stdlib") + os.sep
PACKAGES = sysconfig.get_path("purelib") + os.sep


def user_line(stack: Any) -> str | None:
    frames = [frame for frame in stack or () if not is_torch_file(frame.filename)]
    own = [frame for frame in frames if is_user_file(frame.filename)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


def is_torch_file(file: str) -> bool:
    """Whether a source file belongs to torch itself, unlike torchvision and others."""
    return file.startswith(_TORCH)


def is_user_file(file: str) -> bool:
    """Whether a file is outside torch and Python's standard library."""
    standard = file.startswith(STDLIB) and not file.startswith(PACKAGES)
    return not (standard or is_torch_file(file))


def calling_module(names: Mapping[int, str]) -> str:
    """The name of the innermost module of `names` whose method runs in this thread; "" for none."""
    frame: FrameType | None = sys._getframe(1) if names else None
    while frame is not None:
        if (name := names.get(id(frame.f_locals.get("self")))) is not None:
            return name
        frame = frame.f_back
    return ""
