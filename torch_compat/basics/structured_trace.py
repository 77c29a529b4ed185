"""Torch's structured trace (`TORCH_TRACE`), which tlparse reads. Imports torch only when used."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

FIRST_FRAME = 1000
"""Frame ids of our compile ids begin here; Dynamo's begin at 0."""

_MODEL = "<piecegraph model "

TRACE_LOGGER = "torch.__trace"
"""Name of the logger that gets the records."""


def trace_is_on() -> bool:
    """Whether torch writes a structured trace; False if torch is not imported."""
    if "torch" not in sys.modules:
        return False
    from torch._logging._internal import trace_log

    # until the first record torch keeps a handler even if it has no output
    return any(getattr(h, "root_dir", "") is not None for h in trace_log.handlers)


class _Listener(logging.Handler):
    root_dir = None  # as in torch's own handlers: nothing is written

    def __init__(self, hear: Callable[[Mapping[str, Any], Any], None]) -> None:
        super().__init__()
        self._hear = hear

    def handle(self, record: logging.LogRecord) -> bool:
        """Take no handler lock, and let an error of `hear` reach the code that compiles."""
        self._hear(getattr(record, "metadata", {}), record)
        return True


@contextmanager
def listening(hear: Callable[[Mapping[str, Any], Any], None]) -> Iterator[None]:
    """Call `hear(metadata, record)` for each record of the trace. Imports nothing of torch."""
    logger, listener = logging.getLogger(TRACE_LOGGER), _Listener(hear)
    # first: at the first record torch's handler may take itself off, and the one after it is missed
    logger.handlers.insert(0, listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)


def write_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add an artifact to the trace; `payload` is called only if it is written."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,  # looking up the caller's stack would import Dynamo
    )


def write_phase(name: str, seconds: float, facts: Mapping[str, Any]) -> None:
    """Add a phase that ends now to the timeline that tlparse makes, `chromium_events.json`."""
    from torch._logging._internal import trace_structured

    event = {"name": name, "cat": "piecegraph", "ph": "X", "pid": 0, "tid": 0}
    event |= {"ts": time.time_ns() / 1e3 - seconds * 1e6, "dur": seconds * 1e6}
    payload = json.dumps({**event, "args": {**facts}}, default=str)
    trace_structured("chromium_event", payload_fn=lambda: payload, expect_trace_id=False)


def new_frame() -> int:
    """The frame id for the next model of this process, or its pieces: artifacts nest under it in
    tlparse."""
    from torch._logging.structured import INTERN_TABLE, intern_string

    number = sum(text.startswith(_MODEL) for text in INTERN_TABLE)
    intern_string(f"{_MODEL}{number}>")
    return FIRST_FRAME + number


@contextmanager
def compile_unit(
    frame: int, part: int, stack: Sequence[tuple[str, str, int]] = (), attempt: int = 0
) -> Iterator[None]:
    """Artifacts inside, also torch's own, are those of the compile id `frame`/`part`_`attempt`.

    `stack`, as (name, file, line), outermost first, places it in the tree of tlparse's index.
    """
    from torch._guards import CompileContext, CompileId, compile_context
    from torch._logging._internal import trace_structured
    from torch._logging.structured import intern_string

    context = CompileContext(CompileId(frame_id=frame, frame_compile_id=part))
    context.attempt = attempt
    with compile_context(context):
        if stack:
            frames = [
                {"name": name, "filename": intern_string(file), "line": line, "loc": None}
                for name, file, line in stack
            ]
            trace_structured("dynamo_start", lambda: {"stack": frames})
        yield


def in_compile_unit() -> bool:
    """Whether artifacts have a compile id here, ours or one of Dynamo."""
    from torch._guards import CompileContext

    return CompileContext.current_compile_id() is not None
