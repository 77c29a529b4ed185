"""Static input buffers: the fixed memory from which every recording reads its inputs.

Each buffer is allocated once, for the largest sizes. The view for a padded size starts at the
buffer's first byte and is contiguous for any dynamic dimension: compiled code relies on the
strides of its inputs, and all sizes share one address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...compile.ir.plan import Plan
from ...compile.plan.compiled_model import CompiledModel
from ...config import Steps, check_choice
from ...errors import InputMismatch, MovedTensor, SizeOutOfRange
from ...torch_compat.basics.tensors import storage_id
from ..backends.protocol import Load
from .padding import ZEROS, PaddingPolicy, padding_policy
from .writes import PaddingParts, Write


@dataclass(frozen=True, slots=True)
class StaticInputSpec:
    """One input. A string in `dims` names a symbol, such as "num_tokens"; a number is fixed."""

    name: str
    dims: tuple[int | str, ...]
    dtype: torch.dtype
    padding: PaddingPolicy = ZEROS
    written: bool = False
    """Whether the model writes to it."""
    stride: tuple[int, ...] = ()
    """Strides of an input of fixed shape that was traced with them; empty: contiguous."""

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)

    @property
    def dynamic(self) -> tuple[int, ...]:
        return tuple(index for index, dim in enumerate(self.dims) if isinstance(dim, str))


class StaticInputs:
    """The buffers of one prepared model, for sizes up to `limits` (symbol -> largest size).

    A buffer in `owned` (name -> tensor of the largest shape) belongs to the engine, which writes
    it in place: nothing is copied, its address is checked. If its padded views are not contiguous,
    because a dimension before the dynamic one is larger than 1, it is copied like any other input.
    Raises InputMismatch if it has another form.

    `any_layout` is for code that works with any strides. `order_steps` is the backend's.
    """

    def __init__(
        self,
        specs: Sequence[StaticInputSpec],
        limits: Mapping[str, int],
        device: torch.device,
        *,
        owned: Mapping[str, Tensor] | None = None,
        any_layout: bool = False,
        order_steps: Callable[[], None] | None = None,
    ) -> None:
        self.order_steps = order_steps
        self.specs = tuple(specs)
        self.limits = dict(limits)
        self.device = torch.empty(0, device=device).device  # with its index
        self.loaded: Extent | None = None
        """What the last load wrote, so that padding that is still there is not written again."""
        self.owned = self._in_place(owned or {}, any_layout)
        with torch.inference_mode(False):  # inference tensors could not be written outside of it
            self._buffers = {
                spec.name: self._allocated(spec) for spec in specs if spec.name not in self.owned
            }
            self._paddings = {
                spec.name: self._allocated(spec).fill_(spec.padding.value)
                for spec in specs
                if spec.dynamic and spec.padding.value
            }

    def at(self, sizes: Mapping[str, int]) -> BoundInputs:
        """The inputs of the padded `sizes`, ready to be captured and loaded."""
        views = tuple(self._view(spec, spec.shape(sizes)) for spec in self.specs)
        return BoundInputs(self, views, tuple(sizes[symbol] for symbol in self.limits))

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in memory that was allocated here."""
        return storage_id(tensor) in map(storage_id, self._buffers.values())

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.clear()
        self._paddings.clear()
        self.owned.clear()
        self.loaded = None

    def _in_place(self, owned: Mapping[str, Tensor], any_layout: bool) -> dict[str, Tensor]:
        """Those of the engine's buffers that graphs can read where they are."""
        specs = {spec.name: spec for spec in self.specs}
        in_place = {}
        for name, buffer in owned.items():
            spec = specs[name]
            got = (buffer.dtype, tuple(buffer.shape), buffer.device)
            wanted = (spec.dtype, spec.shape(self.limits), self.device)
            if got != wanted:
                raise InputMismatch(name=name, got=_form(*got), expected=_form(*wanted))
            laid_out = buffer.stride() == spec.stride if spec.stride else buffer.is_contiguous()
            if not laid_out and not spec.dynamic and not any_layout:
                raise InputMismatch(
                    name=name,
                    got=f"laid out with strides {buffer.stride()}",
                    expected=f"strides {spec.stride}" if spec.stride else "a contiguous tensor",
                )
            whole = all(prod(buffer.shape[:dim]) == 1 for dim in spec.dynamic)
            if any_layout or (laid_out and whole):
                in_place[name] = buffer
        return in_place

    def _allocated(self, spec: StaticInputSpec) -> Tensor:
        shape = spec.shape(self.limits)
        if spec.stride:
            strided = torch.empty_strided(shape, spec.stride, dtype=spec.dtype, device=self.device)
            return strided.zero_()
        return torch.zeros(prod(shape), dtype=spec.dtype, device=self.device)

    def _view(self, spec: StaticInputSpec, shape: tuple[int, ...]) -> Tensor:
        if spec.name in self.owned:
            return real_part(self.owned[spec.name], shape)
        buffer = self._buffers[spec.name]
        return buffer if spec.stride else buffer[: prod(shape)].view(shape)

    def padding_like(self, spec: StaticInputSpec, part: Tensor) -> Tensor:
        """A constant tensor of the shape of `part`: what its padding holds, which is not zero."""
        return self._paddings[spec.name][: part.numel()].view(part.shape)


class BoundInputs:
    """The static inputs of one padded size; `views` are what a recording captures.

    `written` are the positions of copied inputs that a replay writes to. Of the engine's buffers
    `filled` are the views that `fill_padding` writes to, `written_in_place` others that the model
    writes to.
    """

    def __init__(
        self, inputs: StaticInputs, views: tuple[Tensor, ...], padded: tuple[int, ...]
    ) -> None:
        self.views = views
        self._inputs = inputs
        self._padded = padded
        self.written = tuple(
            position
            for position, spec in enumerate(inputs.specs)
            if spec.written and spec.name not in inputs.owned
        )
        pairs = zip(inputs.specs, views, strict=True)
        owned = [(spec, view) for spec, view in pairs if spec.name in inputs.owned]
        self.filled = [view for spec, view in owned if spec.dynamic]
        self.written_in_place = [view for spec, view in owned if spec.written and not spec.dynamic]

    def fill_padding(self) -> None:
        """Write the padding value of each input into all of it: a batch of zero real rows.

        An engine's buffer without a dynamic dimension has no padding and stays as it is.
        """
        self._inputs.loaded = None
        if self._inputs.order_steps is not None:
            self._inputs.order_steps()
        for spec, view in zip(self._inputs.specs, self.views, strict=True):
            if spec.dynamic or spec.name not in self._inputs.owned:
                view.fill_(spec.padding.value)

    @property
    def copied(self) -> list[Tensor]:
        """The inputs that a load copies to; the others are read where the engine has them."""
        pairs = zip(self._inputs.specs, self.views, strict=True)
        return [view for spec, view in pairs if spec.name not in self._inputs.owned]

    def holds(self, value: Any) -> bool:
        """Whether `value` is a tensor in the memory of an input that is copied."""
        return isinstance(value, Tensor) and self._inputs.owns(value)

    def copy_back(self, tensors: tuple[Tensor, ...]) -> None:
        """Copy what a replay wrote to the caller's tensors, without the padding."""
        for position in self.written:
            tensor = tensors[position]
            tensor.copy_(real_part(self.views[position], tensor.shape))

    def loader(self, real: tuple[int, ...]) -> Load:
        """A function that copies tensors in and writes the padding, for `real` sizes by symbol.

        It does not check tensors, which `binding.binder` did; it raises MovedTensor if an engine's
        buffer is not the captured one. Raises SizeOutOfRange for real sizes above the padded ones.
        """
        for name, size, most in zip(self._inputs.limits, real, self._padded, strict=True):
            if size > most:
                raise SizeOutOfRange(name=name, size=size, low=0, high=most)
        sizes = dict(zip(self._inputs.limits, real, strict=True))
        copies: list[tuple[int, Tensor]] = []
        stays: list[Stay] = []
        every_step, padding = PaddingParts(), PaddingParts()
        for position, (spec, view) in enumerate(zip(self._inputs.specs, self.views, strict=True)):
            shape = spec.shape(sizes)
            target = real_part(view, shape)
            owned = spec.name in self._inputs.owned
            if owned:
                stays.append((position, target.data_ptr(), target.stride()))
            else:
                copies.append((position, target))
            others_write = owned or spec.written or spec.padding.each_step
            self._pad(spec, view, shape, every_step if others_write else padding)
        return partial(
            _load, self._inputs, Extent(self, real), tuple(stays),
            every_step.after_copies(copies), (every_step + padding).after_copies(copies),
        )  # fmt: skip

    def _pad(
        self, spec: StaticInputSpec, view: Tensor, real: tuple[int, ...], padding: PaddingParts
    ) -> None:
        """Add to `padding` all of `view` outside the box `real`, in disjoint parts.

        They go from the last dynamic dimension to the first. The part of a dimension is real in the
        dimensions before it and whole in those after it, so a row is complete when it is repeated.
        """
        for dim in reversed(spec.dynamic):
            size, most = real[dim], view.shape[dim]
            if size == most:
                continue
            before = [(0, n) for n in real[:dim]]
            after = [(0, n) for n in view.shape[dim + 1 :]]
            part = _box(view, [*before, (size, most), *after])
            last = _box(view, [*before, (size - 1, size), *after]) if size > 0 else None
            match spec.padding.content(last):
                case Tensor() as row:
                    padding.others.append((part, row.expand_as(part)))
                case 0:
                    padding.zeros.append(part)
                case int() | float():
                    dense = padding.constants if part.is_contiguous() else padding.others
                    dense.append((part, self._inputs.padding_like(spec, part)))


Stay = tuple[int, int, tuple[int, ...]]
"""Position, address and strides of an input that must be a part of the engine's buffer."""


def _load(
    inputs: StaticInputs,
    extent: Extent,
    stays: tuple[Stay, ...],
    rows: tuple[Write, ...],
    rows_and_padding: tuple[Write, ...],
    tensors: tuple[Tensor, ...],
) -> None:
    """Copy real rows and write the padding, not again where it still is."""
    for position, address, strides in stays:
        tensor = tensors[position]
        if tensor.data_ptr() != address or tensor.stride() != strides:
            _must_stay(inputs.specs[position].name, address, strides, tensor)
    if inputs.order_steps is not None:
        inputs.order_steps()
    last = inputs.loaded
    if last is extent:
        for write in rows:
            write(tensors)
        return
    inputs.loaded = None  # unless this load is completed
    for write in rows if last is not None and extent.covers(last) else rows_and_padding:
        write(tensors)
    inputs.loaded = extent


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Which part of `bound` a load wrote real rows to; the rest is padding."""

    bound: BoundInputs
    real: tuple[int, ...]

    def covers(self, other: Extent) -> bool:
        """Whether all padding of this extent is padding of `other` too."""
        sizes = zip(self.real, other.real, strict=True)
        return self.bound is other.bound and all(mine >= yours for mine, yours in sizes)


def _must_stay(name: str, address: int, strides: tuple[int, ...], tensor: Tensor) -> None:
    """Raise MovedTensor or InputMismatch unless `tensor` is where and as the engine's buffer is."""
    now = tensor.data_ptr()
    if now != address and tensor.numel():
        raise MovedTensor(
            name=f"input {name!r}", change="moved", recorded=hex(address), now=hex(now)
        )
    if not _same_places(tensor, strides):
        raise InputMismatch(
            name=name,
            got=f"laid out with strides {tensor.stride()}",
            expected=f"the rows of the engine's buffer, strides {strides}",
        )


def _same_places(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether the strides of `tensor` differ from `strides` at most where they are never used."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size <= 1 or mine == other for size, mine, other in pairs)


def _form(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> str:
    return f"{dtype} {shape} on {device}"


def real_part(tensor: Tensor, shape: Iterable[int]) -> Tensor:
    """The first rows, columns, … of `tensor`: its part of shape `shape`."""
    return _box(tensor, [(0, size) for size in shape])


def _box(tensor: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """The part of `tensor` between the (start, stop) of each dimension."""
    return tensor[tuple(slice(start, stop) for start, stop in bounds)]


def unread_buffers(plan: Plan, buffers: Mapping[str, Tensor]) -> list[str]:
    """The names of the engine's buffers that no call form of the model reads.

    Raises InvalidSetting for a name that is no parameter of the model's forward.
    """
    read = [item.label for form in (plan, *plan.forms) for item in form.inputs]
    unread = sorted(buffers.keys() - set(read))
    for name in unread:
        reason = "the model's forward has no such input"
        check_choice(dict.fromkeys([*read, *plan.parameters]), "input_buffers", name, reason)
    return unread


def allocate_inputs(
    compiled: CompiledModel,
    steps: Steps,
    device: torch.device,
    buffers: Mapping[str, Tensor],
    order_steps: Callable[[], None] | None,
) -> StaticInputs:
    """Buffers for all inputs of a call form at their largest sizes, except the engine's `buffers`.

    Raises InvalidSetting for a padding policy that names no parameter of the model's forward.
    """
    plan = compiled.plan
    for name in steps.padding:
        parameter, reason = name.partition(".")[0], "the model's forward has no such parameter"
        check_choice(plan.parameters, "steps.padding", parameter, reason)
    labels = {symbol.name: symbol.label for symbol in plan.symbols}
    specs = []
    for item in plan.inputs:
        specs.append(
            StaticInputSpec(
                name=item.label,
                dims=tuple(labels[d] if isinstance(d, str) else d for d in item.shape),
                dtype=getattr(torch, item.dtype),
                padding=padding_policy(steps, item),
                written=item.written,
                stride=item.stride,
            )
        )
    limits = {symbol.label: symbol.high for symbol in plan.symbols}
    owned = {spec.name: buffers[spec.name] for spec in specs if spec.name in buffers}
    return StaticInputs(
        specs, limits, device,
        owned=owned, any_layout=not compiled.traced, order_steps=order_steps,
    )  # fmt: skip
