"""The input of a search, what it finds, and a script with which that can be reproduced."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import BatchDescriptor, Config, RuntimeMode
from ...compile.guards.tolerance import excess
from ...compile.ir.config import call_forms
from ...dispatch import FORM
from ...errors import InvalidSetting
from ..report.output import Output
from ..steps import Step


@dataclass(frozen=True, slots=True)
class BisectCase:
    """A model with `steps`, which are run in order, from the same state on every stage.

    `layers` is what splitting ops find in the forward context, `capture_metadata` what
    `PreparedModel.capture` takes. A step is wrong where an element differs from the eager model's
    by more than `tolerance`, absolute and relative. With None it is wrong if rounding alone does
    not change the model's result as much, as for shadow steps.
    """

    model: torch.nn.Module
    config: Config
    steps: Sequence[Step]
    layers: Mapping[str, Any] = field(default_factory=dict)
    capture_metadata: Callable[[BatchDescriptor, RuntimeMode], Any] | None = None
    tolerance: float | None = None


def of_one_form(case: BisectCase) -> BisectCase:
    """The case with the call form of its steps; raises InvalidSetting for steps of several."""
    forms = call_forms(case.config.inputs)
    if len(forms) == 1:
        return case
    used = sorted({(step.batch.axes or {}).get(FORM, 0) for step in case.steps})
    if len(used) > 1:
        raise InvalidSetting(
            name="steps",
            value=f"steps of the call forms {', '.join(map(str, used))}",
            reason="a search is for one call form",
            expected="steps of one",
        )
    axes = [axis for axis in case.config.variants.axes if axis.name != FORM]
    config = case.config.changed(**{"inputs": forms[used[0]], "variants.axes": axes})
    return replace(case, config=config, steps=[_without_form(step) for step in case.steps])


def _without_form(step: Step) -> Step:
    axes = {name: n for name, n in (step.batch.axes or {}).items() if name != FORM}
    return replace(step, batch=replace(step.batch, axes=axes or None))


@dataclass(frozen=True, slots=True)
class Wrong:
    """An element that differs; `tensor` numbers those of the result, then those of the state.

    `name` is that of a tensor of the state.
    """

    tensor: int
    element: tuple[int, ...]
    expected: float
    got: float
    name: str = ""

    def __str__(self) -> str:
        error = abs(self.got - self.expected)
        place = f"{self.name or f'output {self.tensor}'} {list(self.element)}"
        return f"{place} expected={self.expected:.6g} got={self.got:.6g} error={error:.3g}"


@dataclass(frozen=True, slots=True)
class Finding:
    """The first stage that is wrong, and the location as far as it was found."""

    stage: str
    step: int | None
    """Index of the wrong step; None if only a size is wrong that no step has."""
    size: int
    """Real tokens."""
    padded: int
    """Tokens that ran."""
    piece: int | None = None
    operator: str | None = None
    """Named only if the result is right without it; so is the pass. In a graph it is the first
    operation that gives something else than in the model."""
    wrong: Wrong | None = None
    """The first wrong element; None if there is no result, for the reason in `note`."""
    note: str = ""
    graph_pass: str | None = None

    def line(self) -> str:
        """All of it on one line."""
        padding = f" (padded to {self.padded})" if self.padded != self.size else ""
        parts = [
            f"stage={self.stage}",
            f"piece={'-' if self.piece is None else self.piece}",
            *([f"pass={self.graph_pass}"] if self.graph_pass else []),
            f"operator={self.operator or '-'}",
            f"step={'-' if self.step is None else self.step}",
            f"size={self.size}{padding}",
            *([f"first wrong: {self.wrong}"] if self.wrong else []),
            *(["no result"] if self.wrong is None and self.step is not None else []),
        ]
        return " ".join(parts) + (f"; {self.note}" if self.note else "")


def first_wrong(
    expected: Sequence[Tensor],
    got: Sequence[Tensor],
    tolerance: float | None = None,
    run: Callable[[], Sequence[Tensor]] | None = None,
) -> Wrong | None:
    """The first difference beyond the tolerance; rows of `got` beyond those expected are padding.

    Without a tolerance it is what rounding changes, measured by `run`, which gives `expected`
    again. Tensors of other rank or smaller shape differ in their first element, with NaN for its
    value; so does the first tensor that only one side has.
    """
    pairs = list(zip(expected, got, strict=False))
    same_size = []
    for want, have in pairs:
        if want.dim() != have.dim() or any(
            h < w for w, h in zip(want.shape, have.shape, strict=True)
        ):
            break
        same_size.append(have[tuple(slice(0, size) for size in want.shape)])
    until = len(same_size)
    if tolerance is not None:
        for index, (want, have) in enumerate(zip(expected, same_size, strict=False)):
            apart = ~torch.isclose(
                have.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True
            )
            if apart.any():
                return _wrong(index, tuple(apart.nonzero()[0].tolist()), want, have)
    else:
        found = excess(expected[:until], same_size, lambda: (run() if run else expected)[:until])
        if found is not None:
            want, have = expected[found.result], same_size[found.result]
            row = () if want.dim() < 2 else (found.row,)
            apart = (have[row].double() - want[row].double()).abs().nan_to_num(torch.inf)
            apart[(have[row] == want[row]) | (have[row].isnan() & want[row].isnan())] = 0
            return _wrong(
                found.result, (*row, *(apart == apart.max()).nonzero()[0].tolist()), want, have
            )
    if until < len(pairs):
        return Wrong(until, (0,) * expected[until].dim(), float("nan"), float("nan"))
    if len(expected) != len(got):
        return Wrong(min(len(expected), len(got)), (), float("nan"), float("nan"))
    return None


def _wrong(tensor: int, element: tuple[int, ...], want: Tensor, have: Tensor) -> Wrong:
    return Wrong(tensor, element, float(want[element]), float(have[element]))


_SCRIPT = '''"""Fails while this is wrong: {line}"""

import sys
from pathlib import Path

sys.path[:0] = {places!r}

from piecegraph.tools.bisect import reproduce

sys.exit(reproduce(Path(__file__).with_suffix(".pt"), {stage!r}))
'''


def write_script(
    case: BisectCase, finding: Finding, path: Path, say: Callable[[str], None], cache: Path | None
) -> None:
    """Write the script to `path` and, beside it, model, settings and steps as `.pt`.

    `cache`, for a wrong result from it, is copied beside it as `.cache`. A case that cannot be
    pickled, such as one of a class made inside a function, is reported through `say`.
    """
    if cache is not None:
        kept = path.with_suffix(".cache")
        shutil.copytree(cache, kept, dirs_exist_ok=True)
        case = replace(case, config=case.config.changed(cache_dir=kept.absolute()))
    facts = {field.name: getattr(case, field.name) for field in fields(case)}
    facts["config"] = {name: getattr(case.config, name) for name in case.config.model_fields_set}
    try:
        torch.save(facts, path.with_suffix(".pt"))
    except Exception as error:
        say(f"no script: {type(error).__name__}: {error}")
        return
    places = [place for place in sys.path if place]
    Output(path).write(_SCRIPT.format(line=finding.line(), places=places, stage=finding.stage))
    say(f"run `python {path}` to see it again")


def load_case(data: Path) -> BisectCase:
    """The case that `write_script` saved as `data`, which is unpickled."""
    facts = torch.load(data, weights_only=False)
    return BisectCase(**{**facts, "config": Config(**facts["config"])})
