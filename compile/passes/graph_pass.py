"""Passes over Inductor's post-grad graph: which are enabled, their order, and their results.

A pass gets a functional graph of aten operators, changes it in place and returns the number of
rewrites. The source of every enabled pass is part of the codegen key.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from torch.fx import Graph

from ...cache.keys.factors import StableTexts
from ...errors import InvalidSetting
from ...events import trace_artifact
from ...torch_compat.compiling.inductor import graph_pass
from ..conditions.code import code_parts
from ..conditions.values import Undescribable
from ..ir.config import GraphPass, named_object
from . import functionalization, unfused_add

ENTRY_POINTS = "piecegraph.passes"

DEDUPE = "dedupe"
"""Compiles equal pieces once. A switch among those of the passes, but not over a graph."""

SHIPPED = (
    GraphPass("functionalization", functionalization.apply),
    GraphPass("unfused_add", unfused_add.apply),
)
"""In order of application. Inductor has removed operators without an effect before."""


def enabled_passes(level: int, chosen: Mapping[str, Any]) -> tuple[GraphPass, ...]:
    """The passes of the library that `chosen` or `level` enables, and then the others, in order.

    `True` for another name is the entry point of that name, an engine's.
    A user's pass under the name of a shipped one takes its place. Raises InvalidSetting for a name
    without a pass, and for a pass that cannot be called.
    """
    shipped = {each.name: each for each in SHIPPED}
    passes = []
    for name, value in {**dict.fromkeys(shipped, level >= 1), **chosen}.items():
        if name == DEDUPE and not isinstance(value, bool):
            raise _invalid(name, value, "it is a switch", "True or False")
        if not isinstance(value, bool):
            passes.append(_user_pass(name, value))
        elif name not in shipped and name != DEDUPE:
            points = entry_points(group=ENTRY_POINTS).names
            if name not in points:
                names = ", ".join([*shipped, *sorted(points)])
                raise _invalid(name, value, "there is no such pass", f"one of {names}")
            passes += [_user_pass(name, name)] if value else []
        elif value and name in shipped:
            passes.append(shipped[name])
    return tuple(passes)


def passes_up_to(passes: Sequence[GraphPass], num_tokens: int | None) -> tuple[GraphPass, ...]:
    """Those of `passes` that run in a range that ends at `num_tokens`; None is no end."""
    return tuple(each for each in passes if num_tokens is None or _pays(each, num_tokens))


def thresholds(passes: Sequence[GraphPass]) -> tuple[int, ...]:
    """Sizes at which the set of passes changes; a range should end at each."""
    limits = {each.max_num_tokens for each in passes} - {None}
    return tuple(sorted(limit for limit in limits if limit is not None))


def pass_factors(passes: Sequence[GraphPass]) -> list[Any]:
    """Names and code by part, in order, for a key; raises Undescribable."""
    return [
        [each.name, each.uuid or StableTexts(code_parts(each.apply, "code"))] for each in passes
    ]


def inductor_passes(
    passes: Sequence[GraphPass], report: Callable[..., None], piece: int
) -> dict[str, Any]:
    """Inductor's options that run `passes` on the piece; `report` gets the facts of each run."""

    def run(stage: str, graph: Graph) -> None:
        for position, each in enumerate(stages[stage]):
            label = f"{stage}.{piece}.{position}.{each.name}"
            trace_artifact(f"{label}.before", lambda: str(graph))
            rewrites = each.apply(graph)
            if stage == "post_grad":  # before, a call of a method may be there for what it writes
                graph.eliminate_dead_code()
            graph.lint()
            trace_artifact(f"{label}.after", lambda: str(graph))
            report(graph_pass=each.name, piece=piece, rewrites=rewrites)

    try:
        uuid: Any = pass_factors(passes)
    except Undescribable:
        uuid = secrets.token_hex(16)  # Inductor finds nothing of it again
    options = {"pre_grad": "pre_grad_custom_pass", "post_grad": "post_grad_custom_post_pass"}
    stages = {
        name: [p for p in passes if p.before_grad is (name == "pre_grad")] for name in options
    }
    # Inductor stores no artifact after a pass with an empty key
    return {
        option: graph_pass(partial(run, stage), uuid)
        for stage, option in options.items()
        if stages[stage]
    }


def _pays(each: GraphPass, num_tokens: int) -> bool:
    return each.max_num_tokens is None or num_tokens <= each.max_num_tokens


def _user_pass(name: str, value: Any) -> GraphPass:
    setting = f"codegen.passes[{name!r}]"
    rewrite = named_object(value, ENTRY_POINTS, setting) if isinstance(value, str) else value
    if isinstance(rewrite, GraphPass):
        return replace(rewrite, name=name)
    if not callable(rewrite):
        expected = "True, False, a GraphPass, or a function of a torch.fx.Graph"
        raise _invalid(name, value, "it cannot be called", expected)
    stated = getattr(rewrite, "uuid", None)
    return GraphPass(name, rewrite, uuid=str(stated()) if callable(stated) else None)


def _invalid(name: str, value: Any, reason: str, expected: str) -> InvalidSetting:
    setting = f"codegen.passes[{name!r}]"
    return InvalidSetting(name=setting, value=value, reason=reason, expected=expected)
