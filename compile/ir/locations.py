"""What a message says of a fault: where in the user's code it is, and the reason in brief."""

from __future__ import annotations

import re

from torch.fx import Node

from ...torch_compat.dynamo import is_torch_file

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def node_location(node: Node) -> str | None:
    """file:line of the innermost frame that is not torch's own; None without a stack."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    users = [frame for frame in frames if not is_torch_file(frame[0])]
    return ":".join((users or frames)[-1]) if frames else None


def first_line(error: BaseException) -> str:
    """The first line of what an error says; the name of its class if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()
