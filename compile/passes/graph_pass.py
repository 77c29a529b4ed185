"""Passes over Inductor's post-grad graph: which are enabled, their order, and their results.

A pass gets a functional graph of aten operators, changes it in place and returns the number of
rewrites. The source of every enabled pass is part of the codegen key.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph

from ...cache.keys.code import code_parts
from ...cache.keys.encoder import Undescribable
from ...cache.keys.factors import Parts
from ...errors import InvalidSetting
from ...events import Events, trace_artifact
from ...torch_compat.compiling.inductor import post_grad_pass
from ..ir.config import CompileConfig, named_object
from . import add_rms_norm, functionalization, no_op, silu_and_mul

ENTRY_POINTS = "piecegraph.passes"


@dataclass(frozen=True, slots=True)
class GraphPass:
    """A named rewrite. `apply` changes a graph and returns the number of rewrites."""

    name: str
    apply: Callable[[Graph], int | None]
    max_num_tokens: int | None = None
    """Enabled only for ranges that end here or below; None for all ranges."""
    from_level: int | None = 1
    """Enabled by default from this optimization level on; None for a pass that must be enabled by
    name."""

    def on(self, config: CompileConfig) -> bool:
        """Whether `config` enables it, by name or by level."""
        by_level = self.from_level is not None and config.level >= self.from_level
        return config.pass_switches.get(self.name, by_level)


SHIPPED = (
    GraphPass("no_op", no_op.apply),
    # Disabled by default: their ops are meant for an engine's own kernels. Our implementations are
    # slower than Inductor's fusion.
    GraphPass("add_rms_norm", add_rms_norm.apply, from_level=None),
    GraphPass("silu_and_mul", silu_and_mul.apply, from_level=None),
    GraphPass("functionalization", functionalization.apply),
)
"""In order of application. No-ops are removed first, because they hide patterns. Readers are moved
last, when the other passes have removed some of them."""


def passes_for(config: CompileConfig, num_tokens: int | None = None) -> tuple[GraphPass, ...]:
    """The enabled passes, in order, for a range that ends at `num_tokens` (None for all).

    Raises InvalidSetting for a switch that names no pass or a pass that cannot be called.
    """
    user = [_user_pass(each) for each in config.user_passes]
    named = {each.name: each for each in (*SHIPPED, *user)}
    if unknown := sorted(set(config.pass_switches) - set(named)):
        raise InvalidSetting(
            name="pass_switches",
            value=unknown[0],
            reason="there is no such pass",
            expected=f"one of {', '.join(named)}",
        )
    return tuple(each for each in named.values() if each.on(config) and _pays(each, num_tokens))


def thresholds(config: CompileConfig) -> tuple[int, ...]:
    """Sizes at which the set of enabled passes changes; a range should end at each."""
    limits = {each.max_num_tokens for each in passes_for(config)} - {None}
    return tuple(sorted(limit for limit in limits if limit is not None))


def pass_factors(passes: Sequence[GraphPass]) -> list[Any]:
    """Names and code by part, in order, for a key; raises Undescribable."""
    return [[each.name, Parts(code_parts(each.apply, "code"))] for each in passes]


def inductor_passes(passes: Sequence[GraphPass], events: Events, piece: int) -> dict[str, Any]:
    """Inductor's options that run `passes` on the piece."""
    if not passes:
        return {}  # Inductor stores no artifact after a pass with an empty key

    def run(graph: Graph) -> None:
        for position, each in enumerate(passes):
            label = f"post_grad.{piece}.{position}.{each.name}"
            trace_artifact(f"{label}.before", lambda: str(graph))
            rewrites = each.apply(graph)
            graph.eliminate_dead_code()
            graph.lint()
            trace_artifact(f"{label}.after", lambda: str(graph))
            events.emit("pass", graph_pass=each.name, piece=piece, rewrites=rewrites)

    try:
        uuid: Any = pass_factors(passes)
    except Undescribable:
        uuid = secrets.token_hex(16)  # Inductor finds nothing of it again
    return {"post_grad_custom_post_pass": post_grad_pass(run, uuid)}


def _pays(each: GraphPass, num_tokens: int | None) -> bool:
    return num_tokens is None or each.max_num_tokens is None or num_tokens <= each.max_num_tokens


def _user_pass(given: Any) -> GraphPass:
    value = named_object(given, ENTRY_POINTS) if isinstance(given, str) else given
    if isinstance(value, GraphPass):
        return value
    if not callable(value):
        raise InvalidSetting(
            name="user_passes",
            value=given,
            reason="it cannot be called",
            expected="a GraphPass, or a function of a torch.fx.Graph",
        )
    return GraphPass(str(getattr(value, "__qualname__", type(value).__qualname__)), value)
