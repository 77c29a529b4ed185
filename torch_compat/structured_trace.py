"""Torch's structured trace (`TORCH_TRACE`), which tlparse reads. Imports torch only when used."""

from __future__ import annotations

import sys
from collections.abc import Callable

TRACE_LOGGER = "torch.__trace"
"""Name of the logger that gets the records."""


def trace_is_on() -> bool:
    """Whether torch writes a structured trace; False if torch is not imported."""
    if "torch" not in sys.modules:
        return False
    from torch._logging._internal import trace_log

    # until the first record torch keeps a handler even if it has no output
    return any(getattr(h, "root_dir", "") is not None for h in trace_log.handlers)


def write_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add an artifact to the trace; `payload` is called only if it is written."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,  # looking up the caller's stack would import Dynamo
    )
