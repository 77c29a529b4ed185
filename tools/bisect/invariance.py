"""Does a result depend on the other requests in the batch? Alone, batched, padded, in each mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import Decision, PreparedModel, RuntimeMode
from ...compile.guards.tolerance import excess
from ...compile.plan.step_names import call_names
from ...dispatch import NO_GRAPH
from ...errors import DispatchError, InvalidSetting
from ..steps import Step
from .case import BisectCase
from .observe import Ran, run_model, run_step, splitting_ops
from .stages import FULL, Stage, prepared_for
from .state import ModelState

Compose = Callable[[Sequence[int]], Step]


@dataclass(frozen=True, slots=True)
class Invariance:
    """A request's rows in one mode and one batch, compared with the request alone.

    In every mode but `eager` it is compared with the compiled code without a graph. `difference` is
    the largest, `wrong` if rounding alone does not change as much. `where` names the first
    splitting op whose tensors differ, where it can be seen.
    """

    mode: str
    others: str
    num_tokens: int
    padded: int
    equal: bool
    difference: float
    wrong: bool
    where: str | None

    def line(self) -> str:
        rows = f"{self.num_tokens} tokens"
        rows += f" padded to {self.padded}" if self.padded != self.num_tokens else ""
        differs = f"differs by {self.difference:.3g}"
        differs += ", which is more than rounding" if self.wrong else ""
        differs += f", first at {self.where}" if self.where else ""
        return f"{self.mode}, {self.others}, {rows}: {'equal' if self.equal else differs}"


def check_invariance(case: BisectCase, compose: Compose, requests: int) -> list[Invariance]:
    """Run request 0 alone, with all or other requests, last, padded; in each mode.

    `compose(numbers)` gives a uniform decode step of these requests, in this order, whose rows
    do not depend on the others. The steps of `case` are not used. Raises InvalidSetting for fewer
    than two requests.
    """
    if requests < 2:
        reason = "one is always alone"
        raise InvalidSetting(name="requests", value=requests, reason=reason, expected="2 or more")
    state = ModelState(case.model, case.layers)
    every = list(range(requests))
    batches = {
        "alone": [0],
        "batched": every,
        "with other requests": [0, *every[: requests // 2 : -1]],
        "last in the batch": [*every[1:], 0],
    }
    compared = []

    def eager(step: Step) -> Ran:
        return run_model(case, step, state)

    def alone() -> list[Tensor]:
        state.restore()
        step = compose([0])
        return _RequestRows(eager(step), ops, 0, step).results

    with prepared_for(case, Stage(FULL, {})) as prepared:
        names = call_names(prepared.compiled.plan)
        ops = splitting_ops(prepared.compiled.plan)
        baseline: dict[str, _RequestRows] = {}
        for mode in ("eager", *(each.name for each in RuntimeMode)):
            for others, numbers in batches.items():
                step = compose(numbers)
                decisions = _decisions(prepared, step, mode)
                for padding, decision in zip(("", ", padded"), decisions, strict=False):
                    state.restore()
                    plain = mode == "eager"
                    ran = eager(step) if plain else run_step(prepared, step, decision, state)
                    if ran.error is not None:
                        raise ran.error
                    rows = _RequestRows(ran, ops, numbers.index(0), step)
                    want = baseline.setdefault("eager" if mode == "eager" else "compiled", rows)
                    difference, where = rows.compare(want, names)
                    wrong = excess(want.results, rows.results, alone) is not None
                    compared.append(
                        Invariance(
                            mode, others + padding, step.batch.num_tokens,
                            decision.descriptor.num_tokens, difference == 0, difference, wrong,
                            where,
                        )
                    )  # fmt: skip
    state.restore()
    return compared


def _decisions(prepared: PreparedModel, step: Step, mode: str) -> list[Decision]:
    """How to run a step in a mode: as dispatched, and if graphs fit also in the largest one."""
    if mode == "eager":
        return [step.without_graph()]
    try:
        decision = prepared.dispatcher.dispatch(step.batch, {RuntimeMode[mode]})
    except DispatchError:
        return []
    largest = _largest(prepared, step, mode)
    if largest == decision.graph_index:
        return [decision]
    return [decision, prepared.dispatcher.follow(largest, step.batch)]


def _largest(prepared: PreparedModel, step: Step, mode: str) -> int:
    usable = [
        each.graph_index
        for each in prepared.dispatcher.explain(step.batch)
        if each.obstacle is None and each.entry.mode.name == mode
    ]
    entries = prepared.dispatcher.plan.entries
    return max(usable, key=lambda index: entries[index].descriptor.num_tokens, default=NO_GRAPH)


class _RequestRows:
    """The rows of one request in the results of a step and in tensors of its splitting calls."""

    def __init__(self, ran: Ran, ops: set[str], place: int, step: Step) -> None:
        length = step.batch.query_len or 1
        own = slice(place * length, (place + 1) * length)
        self.results = [each[own] for each in ran.results if each.dim()]
        self.calls = [
            [each[own] for each in (*call.before, *call.after) if each.dim()]
            for call in ran.calls_of(ops)
        ]

    def compare(self, want: _RequestRows, names: Sequence[str]) -> tuple[float, str | None]:
        """The largest difference of results, and the first call with one."""
        pairs = zip(want.results, self.results, strict=True)
        difference = max((_difference(one, two) for one, two in pairs), default=0.0)
        for name, one, two in zip(names, want.calls, self.calls, strict=False):
            # whole caches and tables are among the tensors: only what has the same form is compared
            same = [pair for pair in zip(one, two, strict=False) if pair[0].shape == pair[1].shape]
            if difference and any(_difference(*pair) for pair in same):
                return difference, name
        return difference, None


def _difference(one: Tensor, two: Tensor) -> float:
    if torch.equal(one, two):
        return 0.0
    apart = (one.double() - two.double()).abs().nan_to_num(float("inf"))
    return float(apart.max()) if apart.numel() else 0.0
