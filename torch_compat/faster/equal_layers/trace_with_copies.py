"""Trace equal layers once: the entry of this folder.

Saves: 3.6 to 4.4 of 5.2 to 6.0 s of CPU time of the trace of the reference decoder with 32 layers
  (torch 2.13.0+cpu; `piecegraph bench prepare`, with and without PIECEGRAPH_OFF=faster).
For: torch 2.13 and later; older versions cannot move the source of a guard and trace each layer.
Can go: once `torch.compiler.nested_compile_region` reuses regions of layers that pass a name to an
  operator, which `tests/torch_compat/test_public_regions.py` notices.

Dynamo traces each layer of a model, though most are equal. Here the call of a module that equals
one whose call was traced copies what that call left in the graph, with its own weights and name. A
call is copied if its trace could not have differed:

- The modules are equal in all that is reachable from them (`match`).
- The arguments have the same form, and torch is in the same state (gradients, autocast, …).
- The traced call reads no other module, asks for no identity, changes no Python state, and returns
  tensors that it computed (`region`).
- A string may differ if it is only passed to operators (`names`).

Modules of a class of which the model has fewer than three are traced, as are parts of a module that
is compared. Guards of the traced module hold for each copy: `copied_facts` states them for its
place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...basics.facts import SHARED_CELL, GuardFact
from ...tracing.dynamo import Captured, capture_full_graph


@dataclass(frozen=True)
class TraceWithCopies:
    """A trace, and what it copied."""

    captured: Captured | None
    copied: int = 0
    """How many calls of modules copied what an equal module had left in the graph."""
    traced_again: Mapping[str, str] = field(default_factory=dict)
    """By class of modules, why the last call was traced and not copied."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """By module, an error of this folder for which its call, or for the model all, was traced."""


def trace_with_copies(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TraceWithCopies:
    """`capture_full_graph`, with copies of the calls of equal modules."""
    from torch._guards import Source

    from .calls import Calls
    from .names import plain_names
    from .watch import watched

    calls = Calls(model)
    can_move_guards = hasattr(Source, "clone")  # not before torch 2.13
    try:
        with watched(calls) if can_move_guards else nullcontext():
            captured = capture_full_graph(model, args, kwargs)
    except Exception as error:
        if not (calls.places or calls.names.passed):
            raise
        captured = capture_full_graph(model, args, kwargs)
        failure = f"{type(error).__name__}: {error}".partition("\n")[0]
        return TraceWithCopies(captured, failures={type(model).__qualname__: failure})
    if captured is not None:
        plain_names(captured.graph.graph)
        captured = replace(captured, guards=copied_facts(captured.guards, calls.places))
    return TraceWithCopies(captured, len(calls.places), calls.reasons, calls.failures)


def copied_facts(
    facts: Iterable[GuardFact], places: Sequence[tuple[str, str]]
) -> tuple[GuardFact, ...]:
    """`facts`, and those on a traced module also for each module that copied its region.

    `places` are expressions of a module that was traced and of one that copied its region.
    """
    by_identity = {(fact.expression, fact.kind, repr(fact.argument)): fact for fact in facts}
    inside = {
        original: [fact for fact in by_identity.values() if original in fact.expression]
        for original, _ in places
    }
    for original, copy in places:
        pattern = re.compile(re.escape(original) + r"(?!\w)")
        for fact in inside[original]:
            expression, argument = pattern.sub(lambda _: copy, fact.expression), fact.argument  # noqa: B023
            if fact.kind in ("DUPLICATE_INPUT", SHARED_CELL):
                argument, count = pattern.subn(lambda _: copy, argument)  # noqa: B023
                if fact.kind == "DUPLICATE_INPUT" and not count:
                    continue  # Dynamo has added its own, if the copy has that object too
            moved = replace(fact, expression=expression, argument=argument)
            by_identity.setdefault((expression, fact.kind, repr(argument)), moved)
    return tuple(by_identity[identity] for identity in sorted(by_identity))
