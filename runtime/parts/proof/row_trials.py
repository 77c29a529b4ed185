"""Runs of one piece on random inputs, at any size and with any padding, and how they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ....compile.ir.config import TOKENS
from ....compile.ir.plan import PieceStep, Plan, evaluated
from ....compile.plan.compiled_model import CompiledModel
from ....compile.plan.result_forms import CheckedOps, foreign_ops
from ....torch_compat.basics.distributed import without_other_ranks
from ...capture.dummy_batch import preserve_rng_state
from ...core.preserved import SavedMemory
from .op_rows import (
    Dtypes,
    OnlyComputes,
    OpRows,
    PaddedOps,
    beyond,
    box,
    other_size,
    run_source,
    same_size,
    wider_dtypes,
)
from .varied_weights import in_place_of, varied
from .without_breaks import Shape, WithoutBreaks, WrittenMemory, extreme_rows

Sizes = Mapping[str, int]
"""By label."""

Found = tuple[str, str | None]
"""The name of a result or of state that padding changes, and the user's line."""

_SEEDS, _ALIKE = (0, 1, 2), (3, 4, 5)
"""Of random rows, and of rows that are all alike: these make the same choice, so that one that has
room for some of them shows, and none of their numbers is that of padding."""
_NO_ROWS = torch.empty(0, device="cpu")


def other_number(eps: float) -> float:
    """That where the model has made another number of its number of tokens."""
    return min(1e-2, 64 * eps)


class Padding(Enum):
    """What the rows behind the real ones hold."""

    RANDOM = auto()
    EXTREME = auto()
    """A maximum, a minimum or zero, in turn."""
    OTHER = auto()
    """Rows of other inputs, but for the last one."""


_OTHER = 6
"""Added to a seed: of other rows."""

_SCALES = (13.0, 1 / 13, -13.0)
"""Of real rows in the padding of what operators compute: above or below them, alike or opposite. By
no power of two, which leaves the digits of a scaled float."""


@dataclass
class _Outcome:
    """What a run gave, by name: tensors with rows of the batch, and memory that stays."""

    rows: dict[str, Tensor]
    state: dict[str, WrittenMemory]


@dataclass
class Trials:
    """Runs of one piece on random inputs, of any size up to the `largest`.

    `sentinels` are values of padding by input.
    """

    compiled: CompiledModel
    step: PieceStep
    untraced: WithoutBreaks | None
    device: torch.device
    largest: Sizes
    sentinels: Mapping[str, float]
    others: Sizes
    """The sizes of all dimensions that are not padded."""
    varies: bool = True
    """Whether runs have other values of weights where theirs may hide something."""
    _made: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """By seed for each argument rows, and extreme ones."""
    _forms: dict[int, list[Shape]] = field(default_factory=dict)
    """Of what breaks return, by number of tokens."""
    _last: tuple[int, _Outcome, _Outcome] | None = None
    """The last size, and the outcomes of its smallest batch, alone and padded."""

    @property
    def piece(self) -> int:
        return self.step.piece

    @cached_property
    def only_computes(self) -> bool:
        """Whether the piece draws no random numbers and writes nothing that it is given.

        Its source is run op by op, up to the first one that does.
        """
        if self.untraced is not None:
            return False
        plan = self.compiled.plan
        sizes = self._at(min(self.largest[TOKENS], self.others[TOKENS]))
        args, _ = self._arguments(_SEEDS[0], sizes, sizes, Padding.RANDOM, moved=False)
        try:
            with OnlyComputes(args):
                run_source(plan.pieces[self.piece].text, args)
        except Exception:  # the source of a piece may not run as it is
            return False
        return True

    @cached_property
    def _foreign(self) -> frozenset[str]:
        return foreign_ops(self.compiled.plan)

    @cached_property
    def _targets(self) -> dict[str, str]:
        """By the names of weights."""
        return {weight.name: weight.target for weight in self.compiled.plan.weights}

    @cached_property
    def _weights(self) -> Mapping[str, Tensor]:
        """By name those that runs read."""
        if self.untraced is not None:
            return dict(self.compiled.model.named_parameters())
        weights = {w.name: w for w in self.compiled.plan.weights if not w.written}
        read = [weights[name] for name in self.step.args if name in weights]
        return {weight.target: self.compiled.weights[weight.target] for weight in read}

    @cached_property
    def _varied(self) -> Mapping[str, Tensor]:
        """By name those with other values; none where there is no memory for them."""
        try:
            return varied(self._weights)
        except torch.OutOfMemoryError:
            return {}

    @contextmanager
    def _own_values(self) -> Iterator[None]:
        """Run with the values of the model's weights inside."""
        try:
            self.varies = False
            yield
        finally:
            self.varies = True

    def mixes(self, real: Sizes, padded: Sizes) -> Found | None:
        """The first result, or state, that depends on padding; and the user's line."""

        def test(seed: int) -> dict[str, Tensor]:
            alone, first = self._run(seed, real, real), self._run(seed, real, padded)
            found = _differing(alone, alone, first, other_size, self._moved(seed, real, padded))
            return found | self._by_padding(seed, real, padded, alone, first)

        with self._own_values():
            found = self._confirmed(test, real, padded)
        return found or (self._confirmed(test, real, padded) if self._varied else None)

    def _by_padding(
        self, seed: int, real: Sizes, padded: Sizes, alone: _Outcome, first: _Outcome
    ) -> dict[str, Tensor]:
        """What differs between the `first` padded run and another of its size. Which row it is
        depends on the inputs."""
        other = self._run(seed, real, padded, Padding.EXTREME)
        depends = _differing(alone, first, other, same_size, self._moved(seed, real, padded))
        return {name: rows.any().view(1) for name, rows in depends.items()}

    def mixes_in_operators(self, real: Sizes) -> Found | None:
        """As `mixes`, at the largest size, with other values in the padding of all that operators
        compute of each row alone. More inputs are tried if it reaches real rows of an operator, as
        where rows are grouped."""
        with suppress(Exception):  # an operator may take floats of 16 bits alone
            return self._mixes_in_operators(real, wider_dtypes())
        return self._mixes_in_operators(real, {})

    def _mixes_in_operators(self, real: Sizes, dtypes: Dtypes) -> Found | None:
        source = self.compiled.plan.pieces[self.piece].text if self.untraced is None else ""
        padded, by_row = self.largest, set[tuple[int, int]]()
        padding = max(padded[size] - real[size] for size in real)
        for seed in (_SEEDS[0], *_ALIKE, *_SEEDS[1:]):
            ops = OpRows(source, dtypes)
            alone = self._run(seed, real, real, ops=ops)
            plain = [PaddedOps(source, ops, padding) for _ in range(2)]
            for each, rows in zip(plain, (Padding.RANDOM, Padding.OTHER), strict=True):
                self._run(seed, real, padded, rows, ops=each)
            others = plain[1].computed_by_row(plain[0])
            by_row = {*others} if seed == _SEEDS[0] else by_row & others.keys()
            others = {place: others[place] for place in by_row}  # rows alike hide their places
            scaled = [PaddedOps(source, ops, padding, others, scale) for scale in _SCALES]
            first, *more = (
                self._run(seed, real, padded, Padding.OTHER, ops=each) for each in scaled
            )
            moved = self._moved(seed, real, padded)
            for each, other in zip(scaled[1:], more, strict=True):
                if depends := _differing(alone, first, other, same_size, moved):
                    where = partial(scaled[0].first_other_row, each, same_size)
                    return self._named(next(iter(depends)), where)
            pairs = ((plain[0], plain[1]), *((scaled[0], each) for each in scaled[1:]))
            if not any(one.has_other_row(each, same_size) for one, each in pairs):
                break
        return None

    def borders(self, first: int, size: int, joined: bool) -> list[tuple[int | None, Found]]:
        """Sizes beyond which batches must not be padded: below `size`, for a batch of `first`
        tokens; and, if they are `joined`, between the size before and `first`. None: all sizes, as
        what padding holds reaches a row.

        Two runs, as the sizes ascend; whatever differs is tried again with other inputs.
        """
        real, padded = self._at(first), self._at(size)
        alone, ends = self._run(_SEEDS[0], real, real), list[tuple[int | None, Found]]()
        if self._last is not None and joined:
            end, fewer, more = self._last
            fewer, more, these = (_Outcome(each.rows, {}) for each in (fewer, more, alone))
            apart = _differing(fewer, more, these, other_size, None)
            if apart and (found := self.differs(end, first)):
                ends.append((self._end(end, first, end), found))
        whole = alone
        if first < size:
            whole = self._run(_SEEDS[0], real, padded, Padding.EXTREME)
            moved = self._moved(_SEEDS[0], real, padded)
            apart = _differing(alone, alone, whole, other_size, moved)
            if apart and (found := self.differs(first, size)):
                ends.append((self._end(first, size, size - 1), found))
        self._last = size, alone, whole
        return ends

    def _end(self, num_tokens: int, padded: int, end: int) -> int | None:
        """`end`, unless padding of other values changes real rows there, too."""
        real, size = self._at(num_tokens), self._at(padded)

        def test(seed: int) -> dict[str, Tensor]:
            alone, first = self._run(seed, real, real), self._run(seed, real, size)
            return self._by_padding(seed, real, size, alone, first)

        return None if self._confirmed(test, real, size) else end

    def reaches(self, num_tokens: int, padded: int) -> bool:
        """Whether a number that is another one at these sizes reaches a real row, or state."""
        return self.differs(num_tokens, padded, other_number) is not None

    def differs(
        self, num_tokens: int, padded: int, limit: Callable[[float], float] = other_size
    ) -> Found | None:
        """As `mixes`, for a number of tokens padded to another."""
        real, size = self._at(num_tokens), self._at(padded)

        def test(seed: int) -> dict[str, Tensor]:
            alone = self._run(seed, real, real)
            whole = self._run(seed, real, size, Padding.EXTREME)
            return _differing(alone, alone, whole, limit, self._moved(seed, real, size))

        return self._confirmed(test, real, size)

    def _at(self, num_tokens: int) -> Sizes:
        return {**self.others, TOKENS: num_tokens}

    def _confirmed(
        self, test: Callable[[int], dict[str, Tensor]], real: Sizes, padded: Sizes
    ) -> Found | None:
        """The first name for which a row differs whatever the inputs are."""
        for seeds in (_SEEDS, _ALIKE):
            if common := self._common(test, seeds):
                name, seed = next(iter(common)), seeds[0]
                return self._named(name, partial(self._mixed_at, seed, real, padded))
        return None

    def _common(
        self, test: Callable[[int], dict[str, Tensor]], seeds: tuple[int, ...]
    ) -> dict[str, Tensor] | None:
        """By name, the rows that differ for all `seeds`."""
        common: dict[str, Tensor] | None = None
        for seed in seeds:
            rows = test(seed)
            if common is not None:
                both = {name: common[name] & rows[name] for name in common if name in rows}
                rows = {name: each for name, each in both.items() if each.any()}
            if not rows:
                return None
            common = rows
        return common

    def _named(self, name: str, where: Callable[[], str | None]) -> Found:
        written = self.untraced.named.get(name) if self.untraced is not None else None
        return written or (name, where())

    def _mixed_at(self, seed: int, real: Sizes, padded: Sizes) -> str | None:
        """The user's line of the first op whose rows depend on padding; None if none is found."""
        source = self.compiled.plan.pieces[self.piece].text if self.untraced is None else ""
        alone, whole = OpRows(source), OpRows(source)
        with suppress(Exception):  # the source of a piece may not run as it is
            self._run(seed, real, real, ops=alone)
            self._run(seed, real, padded, Padding.EXTREME, ops=whole)
        return alone.first_other_row(whole, other_size) or alone.written_at

    def _moved(self, seed: int, real: Sizes, padded: Sizes) -> Callable[[], _Outcome] | None:
        """The padded run with padding that points to a real row, if the user states where padding
        points: what only the stated value reaches is reserved for padding."""
        pads = any(self._sentinel(name) is not None for name in self.step.args)
        if not pads:
            return None
        return lambda: self._run(seed, real, padded, Padding.EXTREME, moved=True)

    def _sentinel(self, name: str) -> float | None:
        inputs = self.compiled.plan.inputs
        return next((self.sentinels.get(item.label) for item in inputs if item.name == name), None)

    def _inputs(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """For each argument that is a tensor; of no elements for the others."""
        if seed not in self._made:
            generator = torch.Generator("cpu").manual_seed(seed)
            alike = seed in _ALIKE
            self._made[seed] = [self._input(name, generator, alike) for name in self.step.args]
        return self._made[seed]

    def _input(self, name: str, generator: torch.Generator, alike: bool) -> tuple[Tensor, Tensor]:
        plan = self.compiled.plan
        if name in self._targets or name in {symbol.name for symbol in plan.symbols}:
            return _NO_ROWS, _NO_ROWS
        dtype, dims = form_of(plan, name)
        last = int(min(self.others.values()) > 1)  # integers may point to rows
        rows = _random(dtype, _shape(dims, self.largest, plan), generator, last)
        if self._sentinel(name) in (0, 1):
            rows.fill_(1 - self._sentinel(name))  # type: ignore[operator]
        elif alike and not (rows.is_floating_point() or rows.is_complex()):
            # extreme padding is 0 there, as padding is where nothing else is stated
            rows.fill_(last)
        symbolic = [dim for dim, size in enumerate(dims) if isinstance(size, str)]
        for dim in symbolic if alike else ():
            rows.copy_(rows.narrow(dim, 0, 1).expand_as(rows).clone())
        return rows.to(self.device), extreme_rows(rows, symbolic).to(self.device)

    def _run(
        self,
        seed: int,
        real: Sizes,
        padded: Sizes,
        padding: Padding = Padding.RANDOM,
        moved: bool = False,
        ops: OpRows | None = None,
    ) -> _Outcome:
        """On inputs of `padded` sizes, of which those beyond the `real` ones are padding.

        `ops` sees each operator.
        """
        with nullcontext() if self.only_computes else _seeded(self.device):
            return self._outcome(seed, real, padded, padding, moved, ops)

    def _arguments(
        self, seed: int, real: Sizes, padded: Sizes, padding: Padding, moved: bool
    ) -> tuple[list[Any], dict[str, Tensor]]:
        """The arguments of a run, and those that it has to itself by name."""
        plan, weights = self.compiled.plan, self.compiled.weights
        others = self._varied if self.varies and self.untraced is None else {}
        count = max(padded[size] - real[size] for size in real)
        sizes = {symbol.name: padded[symbol.label] for symbol in plan.symbols}
        args, tensors = list[Any](), dict[str, Tensor]()
        other_seed = seed + _OTHER if padding is Padding.OTHER else seed
        rows_of = zip(self._inputs(seed), self._inputs(other_seed), strict=True)
        for name, ((rows, extreme), (other, _)) in zip(self.step.args, rows_of, strict=True):
            if name in self._targets:
                target = self._targets[name]
                args.append(others[target] if target in others else weights[target])
            elif name in sizes:
                args.append(sizes[name])
            else:
                _, dims = form_of(plan, name)
                window, inside = (box(_shape(dims, each, plan)) for each in (padded, real))
                if padding is Padding.OTHER and rows.is_floating_point():
                    value = -other[window].contiguous()
                else:
                    source = rows if padding is Padding.RANDOM or real == padded else extreme
                    value = source[window].clone(memory_format=torch.contiguous_format)
                if padding is Padding.OTHER:
                    last = _last(window, inside, count)
                    value[last] = rows[last]
                if (sentinel := self._sentinel(name)) is not None:
                    value.fill_(float(sentinel == 0) if moved else sentinel)
                value[inside] = rows[inside]
                args.append(value)
                tensors[name] = value
        return args, tensors

    def _outcome(
        self,
        seed: int,
        real: Sizes,
        padded: Sizes,
        padding: Padding,
        moved: bool,
        ops: OpRows | None,
    ) -> _Outcome:
        plan = self.compiled.plan
        args, tensors = self._arguments(seed, real, padded, padding, moved)
        pointers = [each for pair in self._inputs(_SEEDS[0]) for each in pair] + [*tensors.values()]
        written = {i.name: i for i in plan.inputs if i.written and i.name in tensors}
        before = {name: tensors[name].clone() for name in written}
        if self.untraced is None:
            with CheckedOps(self._foreign) if real == padded else nullcontext():
                names, results, state = self._of_piece(args, pointers, padded, ops)
        else:
            is_other = padding not in (Padding.RANDOM, Padding.OTHER)
            forms = self._forms.get(real[TOKENS]) if is_other else None
            self.untraced.alike = seed in _ALIKE
            others = self._varied if self.varies else {}
            with ops or nullcontext(), in_place_of(self._weights, others):
                results, state = self.untraced.run(args, pointers, forms)
            names = [*self.step.outs, *self.untraced.arguments]
            if real == padded:
                self._forms[real[TOKENS]] = self.untraced.forms
        unwritten = plan.pieces[self.piece].unwritten if self.untraced is None else ()
        tensor_results = {
            f"{name}: {plan.shapes[name]}" if name in plan.shapes else name: one
            for at, (name, one) in enumerate(zip(names, results, strict=True))
            if isinstance(one, Tensor) and at not in unwritten
        }
        for name, item in written.items():
            if any(isinstance(size, str) for size in item.shape):
                tensor_results[item.label] = tensors[name]
            else:
                state[item.label] = WrittenMemory(before[name], tensors[name])
        return _Outcome(tensor_results, state)

    def _of_piece(
        self, args: list[Any], pointers: list[Tensor], sizes: Sizes, ops: OpRows | None
    ) -> tuple[list[str], list[Any], dict[str, WrittenMemory]]:
        """The results of the compiled piece by name, and the weights that it writes."""
        plan, weights = self.compiled.plan, self.compiled.weights
        kept = [w.target for w in plan.weights if w.written and w.name in self.step.args]
        span = next(span for span in plan.ranges if sizes[TOKENS] <= span.high)
        memory = SavedMemory([weights[target] for target in kept], pointers, check=True)
        try:
            code = self.compiled.pieces[span.artifacts[self.piece]]
            with without_other_ranks():
                results = code(args) if ops is None else ops.interpreted(args)
            results = [one.clone() if isinstance(one, Tensor) else one for one in results]
            after = memory.now().values()
        finally:
            memory.restore()
        memory.check()
        if not kept:
            return list(self.step.outs), results, {}
        buffers = {id(tensor): name for name, tensor in self.compiled.model.named_buffers()}
        names = [buffers.get(id(weights[target]), target) for target in kept]
        state = map(WrittenMemory, memory.values(), after)
        return list(self.step.outs), results, dict(zip(names, state, strict=True))


def _differing(
    alone: _Outcome,
    one: _Outcome,
    other: _Outcome,
    limit: Callable[[float], float],
    moved: Callable[[], _Outcome] | None,
) -> dict[str, Tensor]:
    """The rows of state, and the real rows, that differ between two outcomes, by name. State comes
    first: results that are made from it follow. What the model leaves as it was has to be left."""
    found = dict[str, Tensor]()
    states = [each.state for each in (one, other, alone)]
    for name in dict.fromkeys([*one.state, *other.state]):
        before = next(state[name].before for state in states if name in state)
        first, second, model = (_after(state, name, before) for state in states)
        found[name] = _rows_changed(before, model, first, second, limit)
        if moved is not None and found[name].any():
            reserved = _after(moved().state, name, before) == model
            first, second = (torch.where(reserved, model, each) for each in (first, second))
            found[name] = _rows_changed(before, model, first, second, limit)
    for name in dict.fromkeys([*one.rows, *other.rows]):
        if name in one.rows and name in other.rows and name in alone.rows:
            real = box(tuple(alone.rows[name].shape))
            found[name] = beyond(one.rows[name][real], other.rows[name][real], limit)
        else:
            found[name] = torch.ones(1, dtype=torch.bool, device="cpu")
    return {name: rows for name, rows in found.items() if rows.any()}


def _rows_changed(
    before: Tensor, model: Tensor, one: Tensor, other: Tensor, limit: Callable[[float], float]
) -> Tensor:
    """The rows of state that differ between two runs, or of which `other` changes what `model` does
    not."""
    is_written = (other != before) & (model == before)
    rows = len(before) if before.dim() > 1 else 1
    return beyond(one, other, limit) | is_written.reshape(rows, -1).any(1).cpu()


def _after(state: Mapping[str, WrittenMemory], name: str, before: Tensor) -> Tensor:
    """What memory holds after a run, which may not have written it."""
    return state[name].after if name in state else before


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Random numbers are the same in each run, and those of others go on as if there were none."""
    with preserve_rng_state():
        # torch's manual_seed formats a stack for each kind of device
        (torch.default_generator if device.type == "cpu" else torch).manual_seed(0)
        yield


def form_of(plan: Plan, name: str) -> tuple[str, tuple[int | str, ...]]:
    """Dtype and symbolic shape of a tensor value; sizes and weights have none."""
    for item in plan.inputs:
        if item.name == name:
            return item.dtype, item.shape
    dtype, _, dims = plan.shapes.get(name, "uint8[]").partition("[")
    return dtype, tuple(filter(None, dims.removesuffix("]").split(", ")))


def _shape(shape: tuple[int | str, ...], sizes: Mapping[str, int], plan: Plan) -> Shape:
    values = {**sizes, **{s.name: sizes[s.label] for s in plan.symbols}}
    return tuple(evaluated(dim, values) for dim in shape)


def _last(padded: tuple[slice, ...], real: tuple[slice, ...], padding: int) -> tuple[slice, ...]:
    """Where the last of so many rows of `padding` is."""
    sizes = [(whole.stop, part.stop) for whole, part in zip(padded, real, strict=True)]
    return tuple(slice(n - (n - m) // padding if n > m else 0, n) for n, m in sizes)


def _random(dtype: str, shape: Shape, generator: torch.Generator, last: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        return (torch.rand(shape, generator=generator, device="cpu") + 0.5).to(kind)
    return torch.randint(0, last + 1, shape, generator=generator, device="cpu").to(kind)
