"""Find pieces whose real rows depend on padding, such as `x.sum(0)`, `x.flip(0)` or `x[-1]`.

A graph runs a batch padded to its size. That is right only if each row of a result depends on the
same row of the inputs. Attention, which does mix rows, runs between pieces or is given the real
sizes by its metadata. Each unique piece is run three times on random inputs: padded, padded with
rows that are a maximum, a minimum or zero, and at the real size. Each run starts from the same
state: what it writes to buffers is undone. A model that is not traced is one piece, run without its
breaks: see `WithoutBreaks`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from ....compile.eager_model import trial_run
from ....compile.ir.config import TOKENS
from ....compile.ir.locations import op_line
from ....compile.ir.ops import FakeWrites, tensors_in, written_by
from ....compile.ir.plan import CompiledRange, PieceStep, Plan, evaluated
from ....compile.plan.compiled_model import CompiledModel
from ....compile.plan.result_forms import CheckedOps
from ....errors import OtherRowsWritten, ResultNotAsTraced
from ....torch_compat.basics.ops import OpOverload
from ....torch_compat.basics.tensors import (
    FakeTensorMode,
    storage_id,
    tree_map_only,
    without_modes,
)
from ...backends.ownership import ALLOCATIONS, Ownership, TensorTracker, user_line
from ...capture.breaks import WITHOUT_BREAKS
from ...core.preserved import preserve
from ...core.records import RowsMixed

Shape = tuple[int, ...]

_PADDING, _SEED = 3, 0
_ROUNDING = 1e-2
"""Relative difference that kernels of another size may have, in a low precision."""
_LAST_BITS = 64
"""Largest relative difference at the same size, in units of the dtype's precision. Rows that are
grouped by expert are multiplied in groups whose sizes depend on the other rows."""
_MIXING = re.compile(
    r"\.(sum|mean|amax|amin|max|min|norm|var|std|flip|roll|cumsum|cumprod|sort|topk|argmax|argmin)\("
    r"|\bcat\(|\bpad\(|\.(pad|softmax|t|transpose|permute)\(|\[-1|select\("
)


_ANY = re.compile("")


def find_mixed_rows(
    compiled: CompiledModel,
    device: torch.device,
    *,
    size: str = TOKENS,
    sentinels: Mapping[str, float] = {},
    forward: Callable[..., Any] | None = None,
) -> list[RowsMixed]:
    """The pieces in which padding of `size` reaches real rows. A piece that cannot be run alone,
    because an op in it needs a step, is left out.

    `sentinels` are values of padding by input. `forward` is run, as one piece, if the model is not
    split into pieces.
    """
    plan, mixed = compiled.plan, []
    if any(not result.dtype for result in plan.results):
        return []  # a result of unknown form is that of steps of real sizes alone
    untraced = WithoutBreaks(compiled.model, forward, device) if forward is not None else None
    fixed = {item.name: sentinels[item.label] for item in plan.inputs if item.label in sentinels}
    sizes = _sizes(plan, size)
    steps = {step.piece: step for step in plan.steps if isinstance(step, PieceStep)}
    if untraced is not None:
        args, outs = ([each.name for each in values] for values in (plan.inputs, plan.results))
        steps = {0: PieceStep(piece=0, args=tuple(args), outs=tuple(outs))}
    for index, step in sorted(steps.items()) if sizes else ():
        assert sizes is not None
        span, real, padded = sizes
        fn = untraced or compiled.pieces[span.artifacts[index]]
        try:
            result = _mixed(compiled, step, fn, real, padded, device, fixed)
        except (OtherRowsWritten, ResultNotAsTraced):
            raise
        except Exception:
            continue
        if result is not None:
            text = plan.pieces[index].text
            where = op_line(text, _MIXING) or op_line(text, _ANY)
            where = untraced.mixes_at or where if untraced else where
            mixed.append(RowsMixed(index, result, where, size))
    return mixed


def _sizes(plan: Plan, padded: str) -> tuple[CompiledRange, dict[str, int], dict[str, int]] | None:
    """A span of token counts that allows padding, and real and padded sizes by symbol."""
    for span in plan.ranges:
        symbols = plan.symbols
        low = max([span.low, 2, *(s.low for s in symbols if s.label == TOKENS)])
        high = min([span.high, *(s.high for s in symbols if s.label == TOKENS)])
        real = {s.label: max(s.low, min(s.high, 3)) for s in symbols} | {TOKENS: low}
        most = high if padded == TOKENS else max(s.high for s in symbols if s.label == padded)
        if low <= high and real[padded] + _PADDING <= most:
            return span, real, real | {padded: real[padded] + _PADDING}
    return None


def _mixed(
    compiled: CompiledModel,
    step: PieceStep,
    fn: Any,
    real: Mapping[str, int],
    padded: Mapping[str, int],
    device: torch.device,
    fixed: Mapping[str, float],
) -> str | None:
    """The first result of a piece whose real rows depend on padding."""
    generator = torch.Generator().manual_seed(_SEED)
    names = [(name, *form_of(compiled.plan, name)) for name in step.args]
    whole = [
        _random(dtype, _at(shape, padded, compiled.plan), generator) for _, dtype, shape in names
    ]
    boxes = [_box(_at(shape, real, compiled.plan)) for _, _, shape in names]
    mixed_in = [_extreme_padding(one, box) for one, box in zip(whole, boxes, strict=True)]
    for (name, _, _), box, *values in zip(names, boxes, whole, mixed_in, strict=True):
        if name in fixed:
            for value in values:
                rows = value[box].clone()
                value.fill_(fixed[name])[box] = rows

    def run(sizes: Mapping[str, int], values: list[Tensor]) -> list[Any]:
        symbols = {symbol.name: sizes[symbol.label] for symbol in compiled.plan.symbols}
        args = [
            compiled.weights[target] if (target := _weight(compiled.plan, name)) is not None
            else symbols[name] if name in symbols
            else value.to(device)
            for (name, _, _), value in zip(names, values, strict=True)
        ]  # fmt: skip
        # torch's manual_seed formats a stack for each kind of device
        (torch.default_generator if device.type == "cpu" else torch).manual_seed(_SEED)
        inputs = [value for value in args if all(value is not weight for weight in weights)]
        with preserve(written, inputs, check=True):
            results = fn(args)
            return [one.clone() if written and isinstance(one, Tensor) else one for one in results]

    is_split = not isinstance(fn, WithoutBreaks)
    own = [w for w in compiled.plan.weights if not is_split or w.name in step.args]
    weights = [compiled.weights[weight.target] for weight in own]
    written = [compiled.weights[weight.target] for weight in own if weight.written]
    outs = list(step.outs)
    if not compiled.traced:
        written = list(compiled.model.buffers())
    checked: Any = nullcontext if isinstance(fn, WithoutBreaks) else CheckedOps
    with checked():
        alone = run(real, [value[box].clone() for value, box in zip(whole, boxes, strict=True)])
    first, second = run(padded, whole), run(padded, mixed_in)
    if isinstance(fn, WithoutBreaks):
        outs += fn.arguments
    unwritten = compiled.plan.pieces[step.piece].unwritten if is_split else ()
    results = zip(outs, first, second, alone, strict=True)
    for at, (name, one, two, three) in enumerate(results):
        if isinstance(one, Tensor) and at not in unwritten:
            box = _box(tuple(three.shape))
            precision = torch.finfo(one.dtype).eps if one.dtype.is_floating_point else 0.0
            same = _close(one[box], two[box], _LAST_BITS * precision)
            if not (same and _close(one[box], three)):
                return f"{name}: {compiled.plan.shapes.get(name, '')}"
    return None


class WithoutBreaks:
    """Runs a model that is not traced without its breaks, as the code between them.

    What a break was given is part of the result. What it would write or return is made up: an
    element depends on its position, and in the last run, on inputs with extreme padding, so does
    its own padding. The first run is that of the real sizes.
    """

    def __init__(
        self, model: torch.nn.Module, forward: Callable[..., Any], device: torch.device
    ) -> None:
        self._model = model
        self._forward = forward
        self._key = device.type.upper()
        self._runs: list[list[Shape]] = []
        self.arguments: list[str] = []
        """A name for each tensor that breaks were given."""
        self.mixes_at: str | None = None
        """The user's line of the first op that may mix rows."""

    def __call__(self, args: list[Any]) -> list[Any]:
        self._made = _Made(self._key, args, self._saw_op)
        self._runs.append([])
        self.arguments, self._given = [], list[Tensor]()
        token = WITHOUT_BREAKS.set(self)
        try:
            with trial_run(self._model), self._made:
                return [*self._forward(*args), *self._given]
        finally:
            WITHOUT_BREAKS.reset(token)
            self._made.undo.close()

    def call(self, name: str, fake: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Stand in for a break, which `fake` is on fake tensors."""
        with without_modes(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
            with FakeWrites(mode) as writes:
                result = fake(*fakes[0], **fakes[1])
        pairs = zip(tensors_in((args, kwargs)), tensors_in(fakes), strict=True)
        made = [(one, each) for one, each in pairs if self._made.ownership.is_made(one)]
        for tensor, _ in made:
            self.arguments.append(f"argument of {name}")
            self._given.append(tensor.clone())
        for tensor, each in made:
            if writes.include(each):
                tensor.copy_(self._made_up(tensor))
        return tree_map_only(Tensor, self._made_up, result)

    def run_piece(self, fn: Callable[..., Any], args: Any) -> Any:
        """Run code of Inductor: it made the results that are in no memory that it was given."""
        given = {storage_id(tensor) for tensor in tensors_in(args)}
        with without_modes():
            result = fn(*args)
        for tensor in tensors_in(result):
            if storage_id(tensor) not in given:
                self._made.ownership.make(tensor)
        return result

    def _made_up(self, like: Tensor) -> Tensor:
        """Values of the form of `like`."""
        *before, now = self._runs
        position = sum(
            (torch.arange(n) * (7 * dim + 3)).view(-1, *[1] * (like.dim() - dim - 1))
            for dim, n in enumerate(like.shape)
        )
        values = torch.sin(torch.as_tensor(position) + len(now)).add(1.5).expand(like.shape)
        values = (values if like.dtype.is_floating_point else values > 1.5).to(like.dtype)
        if len(before) == 2:  # with extreme padding
            values = _extreme_padding(values.clone(), _box(before[0][len(now)]))
        now.append(tuple(like.shape))
        return values.to(like.device)

    def _saw_op(self, op: OpOverload) -> None:
        if self.mixes_at is None and _MIXING.search(f".{op.overloadpacket.__name__}("):
            self.mixes_at = user_line()


class _Made(TensorTracker):
    """Tells memory that a run made, or was given, from that of the model and the engine, which
    `undo` restores; what is allocated holds zeros."""

    def __init__(self, device: str, args: list[Any], saw: Callable[[OpOverload], None]) -> None:
        super().__init__(device, Ownership())
        self._args = args
        self._saw = saw
        self.undo = ExitStack()
        """Raises OtherRowsWritten."""
        for tensor in tensors_in(args):
            self.ownership.make(tensor)

    def operation(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        self._saw(func)
        for tensor in written_by(func, args, kwargs):
            if not self.ownership.is_made(tensor):
                self.undo.enter_context(preserve([tensor], self._args, check=True))
        result = super().operation(func, args, kwargs)
        if func.overloadpacket.__name__ in ALLOCATIONS:
            for tensor in tensors_in(result):
                tensor.zero_()
        return result


def _close(one: Tensor, other: Tensor, rounding: float = _ROUNDING) -> bool:
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    one, other = one.double(), other.double()
    return torch.allclose(one, other, rtol=rounding, atol=rounding, equal_nan=True)


def form_of(plan: Plan, name: str) -> tuple[str, tuple[int | str, ...]]:
    """Dtype and symbolic shape of a tensor value; sizes and weights have none."""
    for item in plan.inputs:
        if item.name == name:
            return item.dtype, item.shape
    dtype, _, dims = plan.shapes.get(name, "uint8[]").partition("[")
    return dtype, tuple(filter(None, dims.removesuffix("]").split(", ")))


def _weight(plan: Plan, name: str) -> str | None:
    return next((weight.target for weight in plan.weights if weight.name == name), None)


def _at(shape: tuple[int | str, ...], sizes: Mapping[str, int], plan: Plan) -> Shape:
    values = {**sizes, **{s.name: sizes[s.label] for s in plan.symbols}}
    return tuple(evaluated(dim, values) for dim in shape)


def _box(shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)


def _random(dtype: str, shape: Shape, generator: torch.Generator) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        return (torch.rand(shape, generator=generator) + 0.5).to(kind)
    return torch.randint(0, 2, shape, generator=generator).to(kind)


def _extreme_padding(values: Tensor, real: tuple[slice, ...]) -> Tensor:
    """`values` with its padding rows replaced by extreme ones, so that no maximum or minimum over
    all rows is one of a real row."""
    if not (values.is_floating_point() or values.is_complex()):
        padded = (values == 0).to(values.dtype)
    else:
        padded = values.to(torch.float32, copy=True)
        for dim, part in enumerate(real):
            padding = padded.narrow(dim, part.stop, values.shape[dim] - part.stop)
            for row, each in enumerate(padding.unbind(dim)):
                each.mul_((16, -16, 0)[row % 3])
        padded = padded.to(values.dtype)
    padded[real] = values[real]
    return padded
