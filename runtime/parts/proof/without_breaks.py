"""Runs a model that is not traced without its breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....compile.held_values import trial_run
from ....compile.ir.locations import user_line
from ....compile.ir.ops import FakeWrites, tensors_in, written_by
from ....compile.ir.serialization import dtype_name
from ....compile.plan.compiled_model import CompiledModel
from ....torch_compat.basics.distributed import run_alone
from ....torch_compat.basics.ops import OpOverload, is_collective
from ....torch_compat.basics.tensors import (
    FakeTensorMode,
    storage_id,
    tree_leaves,
    tree_map_only,
    without_modes,
)
from ...backends.ownership import ALLOCATIONS, Ownership, TensorTracker
from ...capture.breaks import WITHOUT_BREAKS
from ...core.preserved import WHOLE, SavedMemory
from .op_rows import box

Shape = tuple[int, ...]


@dataclass
class WrittenMemory:
    """Memory that a run wrote: its contents before and after."""

    before: Tensor
    after: Tensor


class WithoutBreaks:
    """Runs a model that is not traced without its breaks, as the code between them.

    What a break was given is part of the result. What it would write or return is made up: an
    element depends on its position, and with extreme padding, so does its own padding.
    """

    def __init__(
        self, compiled: CompiledModel, forward: Callable[..., Any], device: torch.device
    ) -> None:
        self._model = compiled.model
        weights = [compiled.weights[w.target] for w in compiled.plan.weights if w.written]
        self._written = set(map(storage_id, weights))
        self._forward = forward
        self._key = device.type.upper()
        self._buffers = {storage_id(t): name for name, t in compiled.model.named_buffers()}
        self.arguments: list[str] = []
        """A name for each tensor and number that breaks were given."""
        self.forms: list[Shape] = []
        """Of each tensor that breaks returned or wrote."""
        self.alike = False
        """Whether the rows of what breaks give are all alike."""
        self.named: dict[Any, tuple[str, str | None]] = {}
        """The name of memory that was written, and the user's line that wrote it."""

    def run(
        self, args: list[Any], pointers: list[Tensor], real: list[Shape] | None
    ) -> tuple[list[Any], dict[Any, WrittenMemory]]:
        """The results, then what breaks were given; and what was written, and is restored, of
        memory that was there before.

        With the forms of what breaks return for the `real` rows, the rest of that is extreme
        padding. `pointers`: see `SavedMemory`.
        """
        self._made = _Made(self._key, args, pointers)
        self.arguments, self._given, self.forms, self._real = [], list[Tensor](), [], real
        token = WITHOUT_BREAKS.set(self)
        try:
            with trial_run(self._model), self._made:
                results = [*self._forward(*args), *self._given]
            results = [one.clone() if isinstance(one, Tensor) else one for one in results]
            state = dict[Any, WrittenMemory]()
            for key, (tensor, memory, line) in self._made.written.items():
                (before,), (after,) = memory.values(), memory.now().values()
                state[key] = WrittenMemory(before, after)
                name = self._buffers.get(storage_id(tensor), f"a {dtype_name(tensor.dtype)} tensor")
                self.named[key] = name, line
        finally:
            WITHOUT_BREAKS.reset(token)
            for _, memory, _ in reversed(self._made.written.values()):
                memory.restore()
        for _, memory, _ in self._made.written.values():
            memory.check()
        return results, state

    def call(self, name: str, fake: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Stand in for a break, which `fake` is on fake tensors."""
        with without_modes(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
            with FakeWrites(mode) as writes:
                result = fake(*fakes[0], **fakes[1])
        pairs = zip(tensors_in((args, kwargs)), tensors_in(fakes), strict=True)
        made = [(one, each) for one, each in pairs if self._made.ownership.is_made(one)]
        for tensor, _ in made:
            self._give(tensor.clone(), name)
        for number in (
            each for each in tree_leaves((args, kwargs)) if isinstance(each, int | float)
        ):
            self._give(torch.tensor(number, device="cpu"), name)
            self.named[self.arguments[-1]] = self.arguments[-1], user_line()
        for tensor, each in made:
            if writes.include(each):
                tensor.copy_(self._made_up(tensor))
        return tree_map_only(Tensor, self._made_up, result)

    def _give(self, value: Tensor, name: str) -> None:
        self.arguments.append(f"argument {len(self.arguments)} of {name}")
        self._given.append(value)

    def run_piece(self, fn: Callable[..., Any], args: Any) -> Any:
        """Run code of Inductor: it made the results that are in no memory that it was given."""
        given = {storage_id(tensor): tensor for tensor in tensors_in(args)}
        for identity in given.keys() & self._written:
            self._made.save(given[identity])
        with without_modes():
            result = fn(*args)
        for tensor in tensors_in(result):
            if storage_id(tensor) not in given:
                self._made.ownership.make(tensor)
        return result

    def _made_up(self, like: Tensor) -> Tensor:
        """Values of the form of `like`."""
        first = int(self.alike)
        position = sum(
            (torch.arange(n, device="cpu") * (7 * dim + 3)).view(-1, *[1] * (like.dim() - dim - 1))
            for dim, n in enumerate(like.shape[first:], first)
        )
        at = len(self.forms)
        values = torch.sin(torch.as_tensor(position, device="cpu") + at).add(1.5).expand(like.shape)
        values = (values if like.dtype.is_floating_point else values > 1.5).to(like.dtype)
        self.forms.append(tuple(like.shape))
        real = self._real[at] if self._real is not None and at < len(self._real) else like.shape
        padded = extreme_rows(values, range(values.dim()))
        padded[box(real)] = values[box(real)]
        return padded.to(like.device)


class _Made(TensorTracker):
    """Tells memory that a run made, or was given, from that of the model and the engine, which it
    saves before the first write; what is allocated holds zeros."""

    def __init__(
        self,
        device: str,
        args: list[Any],
        pointers: list[Tensor],
    ) -> None:
        super().__init__(device, Ownership())
        self._pointers = pointers
        self.written: dict[Any, tuple[Tensor, SavedMemory, str | None]] = {}
        for tensor in tensors_in(args):
            self.ownership.make(tensor)

    def operation(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        for tensor in written_by(func, args, kwargs):
            if not self.ownership.is_made(tensor):
                self.save(tensor)
        result = super().operation(func, args, kwargs)
        if func.overloadpacket.__name__ in ALLOCATIONS:
            for tensor in tensors_in(result):
                tensor.zero_()
        return result

    def run(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """What is compared may need more runs on one rank: none of them meets another."""
        alone = is_collective(func)
        return run_alone(func, args, kwargs) if alone else super().run(func, args, kwargs)

    def save(self, tensor: Tensor) -> None:
        """All of the storage, since another run writes other rows of it; of a large one the rows
        that are pointed to."""
        storage = tensor.untyped_storage()
        whole = storage.nbytes() <= WHOLE
        place = () if whole else (tensor.storage_offset(), *tensor.shape)
        key = (storage_id(tensor), *place)
        if key not in self.written:
            kept = tensor
            if whole and tensor.numel() * tensor.element_size() < storage.nbytes():
                with torch.inference_mode(False), torch.no_grad():
                    kept = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                    kept.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
            saved = SavedMemory([kept], self._pointers, check=True)
            self.written[key] = tensor, saved, user_line()


def extreme_rows(values: Tensor, dims: Iterable[int]) -> Tensor:
    """Extreme rows in place of `values`, so that no maximum or minimum over all rows is one of a
    real row: 16 times as large, as small, and zero."""
    if not (values.is_floating_point() or values.is_complex()):
        return (values == 0).to(values.dtype)
    padded = values.to(torch.float32, copy=True)
    for dim in dims:
        factors = torch.tensor([16.0, -16.0, 0.0], device="cpu").repeat(values.shape[dim] // 3 + 1)
        shape = [-1, *[1] * (values.dim() - dim - 1)]
        padded *= factors[: values.shape[dim]].view(shape)
    return padded.to(values.dtype)
