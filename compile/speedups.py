"""The speed-ups in `torch_compat.faster`: only this module imports them.

PIECEGRAPH_OFF=faster turns all of them off. Everything but the time is the same then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..cache.keys.environment import FASTER, parts_off
from ..events import Events
from ..torch_compat.tracing.dynamo import Captured, capture_full_graph


def are_on() -> bool:
    return FASTER not in parts_off()


def capture(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], events: Events
) -> Captured | None:
    """`capture_full_graph`, which copies equal layers."""
    if not are_on():
        return capture_full_graph(model, args, kwargs)
    from ..torch_compat.faster.equal_layers.trace_with_copies import trace_with_copies

    trace = trace_with_copies(model, args, kwargs)
    events.count("equal_modules", trace.copied)
    for kind, reason in trace.traced_again.items():
        events.emit("module_traced_again", module=kind, reason=reason)
    for module, error in trace.failures.items():
        events.emit("copies_failed", level=logging.WARNING, module=module, reason=error)
    return trace.captured


@contextmanager
def generating_code() -> Iterator[Callable[[], None]]:
    """Generate code inside, without keys that nobody reads.

    Gives what waits for the kernels of the code: they are built meanwhile.
    """
    if not are_on():
        yield lambda: None
        return
    from ..torch_compat.faster.cache_keys import short_cache_keys
    from ..torch_compat.faster.later_kernels import later_kernels

    with short_cache_keys(), later_kernels() as wait_for_kernels:
        yield wait_for_kernels


def called_directly(call: Callable[[list[Any]], Any], artifact: Any) -> Callable[[list[Any]], Any]:
    """`call`, the function of an artifact of Inductor, with less around its graph."""
    if not are_on():
        return call
    from ..torch_compat.faster.direct_calls import direct

    return direct(call, artifact)
