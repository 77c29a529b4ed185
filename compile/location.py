"""Where in the user's code a node of a traced graph comes from."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)


def node_location(node: Node) -> str | None:
    """file:line of the innermost frame that is not torch's own; None without a stack."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    users = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return ":".join((users or frames)[-1]) if frames else None
