"""Find where padding reaches real rows or state, such as `x.sum(0)`, `load.index_add_(0, …)`, a
kernel that is another one from 8 rows on, or a choice by the number of rows.

A graph runs a batch padded to its size. That is right only if each row of a result depends on the
same row of the inputs, and if padding writes nothing that is kept. Attention, which does mix rows,
runs between pieces or is given the real sizes by its metadata. Each unique piece is run on random
inputs, padded and at the real size, and its results and what it wrote are compared:

- at one pair of sizes, padded with random rows, and with rows of a maximum, a minimum or zeros;
- at the largest captured size with other values in the padding of what operators compute, all above
  or all below the real rows, as inputs may not lead to a rank that padding takes, or to an expert
  that has no room;
- for each captured size at the smallest batch that it serves, and at the largest one for which a
  number that the model makes of its number of tokens is another.

What was found is kept in the cache, since looking takes longer than a warm start. It is known again
for the same code, weights and sizes. The code is a bundle's, whose digest holds every byte of it,
and may call no operator of others, whose kernels have no digest. Of a parameter, and of a buffer
above 16 MiB, 64 elements are compared: what others would show that zeros and ones of parameters
hide is looked for, too, by runs with other values in their place.

Each run starts from the same state: what it writes is undone. While an engine compiles beside its
steps, pieces that only compute are looked at there: the steps see nothing of it. A model that is
not traced is one piece, run without its breaks: see `WithoutBreaks`. A choice in its Python is a
border that no batch is padded across, whatever the runs give. A difference counts if the same row
has it for each of three inputs: a close decision, as of a router, falls another way in other
company.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from ....cache import Cache, Entry, Key
from ....cache.keys.factors import Json
from ....compile.ir.config import TOKENS
from ....compile.ir.locations import handled
from ....compile.ir.plan import PieceStep, Plan
from ....compile.plan.compiled_model import CompiledModel
from ....compile.plan.result_forms import foreign_ops
from ....errors import OtherRowsWritten, ResultNotAsTraced
from ....torch_compat.basics.tensors import as_bytes
from ...core.preserved import WHOLE
from ...core.records import RowsMixed
from .row_trials import Sizes, Trials
from .varied_weights import any_values
from .without_breaks import WithoutBreaks

_PADDING = 3

_SAMPLED, _STEPS = 64, (7919, 104729, 1299709)

_METHOD = 4
"""Raised where one that was used before finds less."""

KNOWN = "padding"
"""Kind of the cache entries with what was found."""


def known_mixed_rows(
    cache: Cache, compiled: CompiledModel, device: torch.device, **asked: Any
) -> Iterable[RowsMixed | str]:
    """As `find_mixed_rows`, which is asked only if `cache` does not have what it found."""
    key = _key(compiled, **asked)
    if key is None:
        return find_mixed_rows(compiled, device, **asked)
    entry = cache.lookup(KNOWN, key, count=False)
    if isinstance(entry, Entry):
        known: Any = entry.meta.get("found")
        with suppress(TypeError):  # what another version wrote is looked for again
            return [RowsMixed(**facts) for facts in known]
    found = [*find_mixed_rows(compiled, device, **asked)]
    facts: list[Json] = [record.facts() for record in found if isinstance(record, RowsMixed)]
    if len(facts) == len(found):  # what could not run is tried again
        cache.publish(KNOWN, key, {"found": facts}, {})
    return found


def keep_beside_steps(
    cache: Cache, compiled: CompiledModel, device: torch.device, **asked: Any
) -> Iterable[RowsMixed | str]:
    """As `known_mixed_rows`, in a thread beside steps; nothing if a run could be seen by them.

    The memory of a device is the engine's, and what a step needs of it must not be taken.
    """
    if device.type != "cpu" or asked["forward"] is not None or _key(compiled, **asked) is None:
        return ()
    sizes = _other_sizes(compiled.plan, {}, 1)
    steps = _by_piece(compiled.plan).values()
    if not all(Trials(compiled, s, None, device, sizes, {}, sizes).only_computes for s in steps):
        return ()
    return known_mixed_rows(cache, compiled, device, **asked)


def find_mixed_rows(
    compiled: CompiledModel,
    device: torch.device,
    *,
    captured: Collection[int],
    size: str = TOKENS,
    sentinels: Mapping[str, float] = {},
    max_num_reqs: int = 3,
    forward: Callable[..., Any] | None = None,
) -> Iterator[RowsMixed | str]:
    """Where padding of `size` reaches real rows or state in one trace of a model.

    `captured` are the sizes in tokens that batches are padded to, `sentinels` values of padding by
    input. `forward` is run, as one piece, if the model is not split into pieces. At the end, why
    pieces could not be run alone: an op in them may need a step, or their source another name.
    """
    plan = compiled.plan
    if plan.form_is_unknown():
        return  # a result of unknown form is that of steps of real sizes alone
    untraced = WithoutBreaks(compiled, forward, device) if forward is not None else None
    low, high = _limits(plan)
    served = [n for n in sorted(captured) if low <= n <= high]
    others = _other_sizes(plan, sentinels, max_num_reqs)
    sized = _sizes(plan, size, others)
    most = {size: sized[1][size]} if sized else {}
    if served and size == TOKENS:
        most = {size: max([*served, *most.values()])}
    steps = _by_piece(plan)
    if untraced is not None:
        args, outs = ([each.name for each in values] for values in (plan.inputs, plan.results))
        steps = {0: PieceStep(piece=0, args=tuple(args), outs=tuple(outs))}
    largest = {**others, TOKENS: max(low, 2)} | most
    if sized and size != TOKENS:
        others = others | {size: sized[0][size]}
    given = (untraced, device, largest, sentinels, others)
    trials = [Trials(compiled, step, *given) for step in steps.values()]
    failed = dict[int, str]()

    def tried(trial: Trials, test: Callable[..., Any], *args: Any) -> Any:
        try:
            return None if trial.piece in failed else test(*args)
        except (OtherRowsWritten, ResultNotAsTraced):
            raise
        except Exception as error:
            failed[trial.piece] = handled(error)
            return None

    mixed = False
    for trial in trials if sized else ():
        if found := tried(trial, trial.mixes, *(sized or ())):
            mixed, (name, where) = True, found
            yield RowsMixed(trial.piece, name, where, size)
    if size == TOKENS and not mixed:
        yield from _borders(plan, trials, served, tried)
    if size != TOKENS:
        yield from _other_values(plan, size)
    if sized and not mixed:
        for trial in trials:
            if found := tried(trial, trial.mixes_in_operators, sized[0]):
                name, where = found
                yield RowsMixed(trial.piece, name, where, size)
    yield from (f"piece {piece} cannot be run alone: {why}" for piece, why in failed.items())


def _borders(
    plan: Plan, trials: Sequence[Trials], captured: Sequence[int], tried: Callable[..., Any]
) -> Iterator[RowsMixed]:
    """Sizes beyond which batches must not be padded: of the rows of a graph of `captured` tokens
    only those of larger batches are the model's.

    What cannot be tried does not show that a number reaches no row.
    """
    uses = [use for use in plan.size_uses if use.size == TOKENS]
    values = [use.values(max(captured, default=0)) for use in uses]
    previous, low = 0, _limits(plan)[0]
    stated = set[tuple[str, int]]()
    for size in captured:
        least = low
        for use, value in zip(uses, values, strict=True):
            others = [n for n in range(least, size) if value[n] != value[size]]
            if not others:
                continue
            # runs decide on a choice where one size alone is on its other side, as for layouts
            alone = use.is_choice and len(others) == 1 and use.expression != TOKENS
            unknown = use.is_choice or use.is_hidden
            decide = not unknown or (alone and any(t.untraced for t in trials))
            if not decide or any(
                tried(t, t.reaches, others[-1], size) is not False for t in trials
            ):
                least = others[-1] + 1
                if (use.expression, least) not in stated:
                    stated.add((use.expression, least))
                    yield RowsMixed(None, use.expression, use.where, TOKENS, others[-1])
        first = max(least, previous + 1)
        for trial in trials:
            borders = tried(trial, trial.borders, first, size, first == previous + 1)
            for end, (name, where) in borders or ():
                yield RowsMixed(trial.piece, name, where, TOKENS, end)
        previous = size


def _other_values(plan: Plan, size: str) -> Iterator[RowsMixed]:
    """What the model makes of a size that all graphs have at its largest, and is another one at a
    size of a step."""
    for symbol in (each for each in plan.symbols if each.label == size):
        for use in (each for each in plan.size_uses if each.size == size):
            values = use.values(symbol.high)[symbol.low :]
            if any(value != values[-1] for value in values):
                yield RowsMixed(None, use.expression, use.where, size)


def _by_piece(plan: Plan) -> dict[int, PieceStep]:
    """A step of each unique piece."""
    return {step.piece: step for step in plan.steps if isinstance(step, PieceStep)}


def _limits(plan: Plan) -> tuple[int, int]:
    """The token counts that a trace serves."""
    limits = [(s.low, s.high) for s in plan.symbols if s.label == TOKENS]  # none for one size alone
    lows, highs = zip((plan.ranges[0].low, plan.ranges[-1].high), *limits, strict=True)
    return max(lows), min(highs)


def _other_sizes(plan: Plan, sentinels: Mapping[str, float], max_num_reqs: int) -> dict[str, int]:
    """By label. A value that the user states for padding may point to a row of another size, of
    which there are as many as it takes for that, if so many are served."""
    least = max([3.0, *(value + 1 for value in sentinels.values())])
    most = {"num_reqs": max(3, max_num_reqs)}
    highs = {s: min(s.high, most.get(s.label, s.high)) for s in plan.symbols}
    return {s.label: int(max(s.low, min(high, least))) for s, high in highs.items()}


def _sizes(plan: Plan, padded: str, others: Sizes) -> tuple[Sizes, Sizes] | None:
    """Real and padded sizes of the first pair; None if no size allows padding."""
    (low, high), limits = _limits(plan), {s.label: (s.low, s.high) for s in plan.symbols}
    least, most = (low, high) if padded == TOKENS else limits[padded]
    real = {**others, TOKENS: min(max(low, 2), high)}
    real[padded] = max(least, min(real[padded], max(1, most - _PADDING)))
    size = min(real[padded] + _PADDING, most)
    return (real, real | {padded: size}) if size > real[padded] else None


def _key(compiled: CompiledModel, **asked: Any) -> Key | None:
    """None where the code may be another one without a sign of it."""
    plan = compiled.plan
    if compiled.bundle is None or foreign_ops(plan):
        return None
    kept = [weight.target for weight in plan.weights if not weight.written]
    try:
        weights = _digest(_elements([compiled.weights[target] for target in kept]))
    except (NotImplementedError, RuntimeError, TypeError):  # a tensor of another class
        return None
    return Key.of(
        "trace",
        {
            "bundle": compiled.bundle,
            "plan": _digest(plan.model_dump_json().encode()),
            "weights": weights,
            "captured": sorted(asked["captured"]),
            "size": asked["size"],
            "max_num_reqs": asked.get("max_num_reqs", 3),
            "method": _METHOD,
            "sentinels": {name: str(value) for name, value in asked["sentinels"].items()},
            "threads": torch.get_num_threads(),
        },
    )


def _elements(weights: Iterable[torch.Tensor]) -> bytes:
    """Of each weight an element in each of `_SAMPLED` rows, in other columns. All of a buffer: its
    values may be what keeps rows apart."""
    number = torch.arange(_SAMPLED, device="cpu")

    @functools.cache
    def places(shape: torch.Size) -> tuple[torch.Tensor, ...]:
        rows = [number * n // _SAMPLED for n in shape[:1]]
        columns = [number * step % n for n, step in zip(shape[1:], _STEPS, strict=False)]
        return (*rows, *columns)

    def compared(weight: torch.Tensor) -> torch.Tensor:
        whole = weight.nbytes <= WHOLE and not any_values(weight)
        return weight.detach() if whole else weight.detach()[places(weight.shape)]

    parts = [as_bytes(compared(w)).cpu() for w in weights if w.numel()]
    content = torch.cat(parts) if parts else torch.empty(0, device="cpu")
    return ctypes.string_at(content.data_ptr(), content.nbytes)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
