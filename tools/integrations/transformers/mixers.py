"""Layers that mix tokens and do not call AttentionInterface, each as one splitting op.

Such are convolutions, linear attention and recurrences of hybrid models, attention that a model
computes itself, and indexers, which select the keys that each token sees. The op runs the layer's
own forward for each request of the step, which is right and slow; an engine with kernels for packed
requests and a state cache passes its own layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from .... import get_forward_context
from ....errors import LayerMissing, MissingMetadata
from .attention import LIBRARY, Mask, PackedRequests, hidden_keys, rows_of

MIXER_OP = "piecegraph_hf::mixer"

LIBRARY.define("mixer(Tensor?[] inputs, Tensor(a!) output, str layer_name) -> ()")

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
LONG = 2**20
"""Tokens of a request that is longer than what any layer selects of it."""


class UnknownCall(Exception):
    """A layer is called or returns in a form that the op cannot express; the message says which."""

    def __init__(self, reason: str, layer: str = "") -> None:
        super().__init__(reason)
        self.layer = layer


class Mixer:
    """The default layer of the op: a module's own forward over each request of a step.

    `learn` runs it once with a token count that equals no feature size: that dimension has tokens.
    A mask that `mask_of` can read is made for each request. Integers in a result are places of
    tokens in their request, as many as of a long one; -1 stands for none.
    """

    def __init__(
        self,
        module: Any,
        name: str,
        mask_of: Callable[[Tensor], Mask | None] = lambda mask: None,
        by_row: bool = False,
    ) -> None:
        self.module = module
        self.name = name
        self.by_row = by_row
        """Whether it mixes nothing, as experts do not, and runs over all rows of a step at once."""
        self._mask_of = mask_of
        self.width: int | None = None
        """Numbers that the inputs have for each token; None if one has a value for each pair."""
        self.learned = False
        self._forward = module.forward

    def learn(self, lengths: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """Run one call, request by request, and remember its form; returns as steps do.

        Raises UnknownCall.
        """
        try:
            return self._learned(lengths, args, kwargs)
        except (UnknownCall, RuntimeError, ValueError, TypeError, IndexError) as error:
            kind, reason = type(self.module).__name__, str(error).partition("\n")[0]
            message = f"{self.name} ({kind}) mixes packed requests: {reason}"
            raise UnknownCall(message, self.name) from error

    def _learned(self, lengths: Sequence[int], args: Any, kwargs: Any) -> Any:
        tokens = sum(lengths)
        self._template, self._tokens = (args, kwargs), tokens
        leaves = list(_leaves([*args, *kwargs.values()]))
        for value in leaves:
            if not isinstance(value, (Tensor, *_PLAIN)):
                raise UnknownCall(f"takes a {type(value).__name__}")
        module = self.module
        tensors = [(i, x) for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        masks = [self._mask_of(x) for _, x in tensors]
        self._masks = [
            mask and functools.partial(_mask_of_request, mask, x.dim(), x.dtype)
            for mask, (_, x) in zip(masks, tensors, strict=True)
        ]
        self.masked = any(masks)
        """Whether it takes a mask, which the call in a step has none of."""
        module.mixer_inputs = tuple(
            i for mask, (i, _) in zip(masks, tensors, strict=True) if mask is None
        )
        inputs = _inputs(module, args, kwargs)
        self._dims = [[d for d, n in enumerate(x.shape) if n == tokens] for x in inputs]
        sized = [
            (leaf, dims[0])
            for leaf, dims in zip(module.mixer_inputs, self._dims, strict=True)
            if dims
        ]
        sized += [(i, -1) for i, x in enumerate(leaves) if _is_count(x, tokens)]
        if not sized:
            raise UnknownCall("takes no tensor with a row for each token, and not their number")
        result = self._called(inputs, 0, tokens)  # for its form alone
        items = result if isinstance(result, (tuple, list)) else (result,)
        index = next((i for i, x in enumerate(items) if isinstance(x, Tensor)), None)
        if index is None:
            raise UnknownCall(f"returns a {type(result).__name__}")
        self._index, tensor = index, items[index]
        self.selects = not tensor.is_floating_point()
        rows = [x for x in items if isinstance(x, Tensor) and [*x.shape].count(tokens) == 1]
        if len(rows) > 1:
            raise UnknownCall("returns several tensors with a row for each token")
        size = list(tensor.shape)
        if self.selects:
            size[-1] = self._result_of_long(inputs).shape[-1]
        if size.count(tokens) != 1:
            raise UnknownCall("returns a tensor without one row for each token")
        self.dim = size.index(tokens)
        shape = [*size[: self.dim], -1, *size[self.dim + 1 :]]
        widths = [x.numel() // tokens for x, dims in zip(inputs, self._dims, strict=True) if dims]
        pairs = any(len(dims) > 1 for dims in self._dims)
        self.width = None if pairs else sum(widths)
        count = 0 if items[0] is result else len(items)
        module.mixer_form = (*sized[0], tuple(shape), tensor.dtype)
        module.mixer_result = (self._index, count, isinstance(result, list))
        output = _empty(module, leaves)
        self(inputs, output, PackedRequests(tuple(lengths)))
        self.learned = True
        return _returned(module, output)

    def rows(self, inputs: Sequence[Tensor | None]) -> Tensor:
        """The inputs that have a value for each token, next to each other: (T, width)."""
        with_rows = [(x, dims[0]) for x, dims in zip(inputs, self._dims, strict=True)
                 if x is not None and dims]  # fmt: skip
        return torch.cat([x.movedim(dim, 0).flatten(1) for x, dim in with_rows], 1)

    def over_rows(self, rows: Tensor, inputs: Sequence[Tensor | None]) -> Tensor:
        """The result for one request with these `rows`; `inputs` are those of a step, for what has
        no value for each token."""
        filled, start = list[Tensor | None](), 0
        for x, dims in zip(inputs, self._dims, strict=True):
            if x is not None and dims:
                form = x.movedim(dims[0], 0)
                part = rows[:, start : start + form[0].numel()].to(x.dtype)
                start += part.shape[1]
                x = part.reshape(-1, *form.shape[1:]).movedim(0, dims[0])
            filled.append(x)
        return self._rows_of(self._called(filled, 0, len(rows)))

    def install(self) -> None:
        """Let the module call the op."""
        self.module.layer_name = self.name
        if not calls_op(self.module):
            self.module.forward_alone = vars(self.module).get("forward")
            self.module.forward = MethodType(_mix, self.module)

    def __call__(
        self, inputs: Sequence[Tensor | None], output: Tensor, metadata: PackedRequests
    ) -> None:
        if self.by_row:
            output.copy_(self._rows_of(self._called(inputs, 0, output.shape[self.dim])))
            return
        rows = output.movedim(self.dim, 0)
        for of_one in rows_of(metadata.query_lens):
            if length := of_one.stop - of_one.start:
                part = self._rows_of(self._called(inputs, of_one.start, length))
                rows[of_one].copy_(part.movedim(self.dim, 0))
        rows[sum(metadata.query_lens) :].zero_()

    def _called(self, inputs: Sequence[Tensor | None], start: int, length: int) -> Any:
        """The module's own forward on the tokens of one request."""
        cut = []
        for tensor, dims in zip(inputs, self._dims, strict=True):
            for dim in dims:
                tensor = None if tensor is None else tensor.narrow(dim, start, length)
            cut.append(tensor)
        return self._forwarded(cut, length)

    def _rows_of(self, result: Any) -> Tensor:
        """What the op gives of a result; places that a short request has not are -1."""
        tensor: Tensor = result if isinstance(result, Tensor) else result[self._index]
        missing = self.module.mixer_form[2][-1] - tensor.shape[-1] if self.selects else 0
        return functional.pad(tensor, (0, missing), value=-1) if missing else tensor

    def _result_of_long(self, inputs: Sequence[Any]) -> Tensor:
        """The form of what the module selects from a request of LONG tokens."""

        def size(x: Tensor, dims: list[int]) -> list[int]:
            return [LONG if d in dims else n for d, n in enumerate(x.shape)]

        meta = [
            torch.empty(size(x, dims), dtype=x.dtype, device="meta")
            for x, dims in zip(inputs, self._dims, strict=True)
        ]
        state = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        weights = {f"module.{name}": x.to("meta") for name, x in state.items()}
        result = functional_call(_Called(self.module, self._forwarded), weights, (meta, LONG))
        selected: Tensor = result if isinstance(result, Tensor) else result[self._index]
        return selected

    def _forwarded(self, inputs: Sequence[Any], length: int) -> Any:
        """The module's own forward on `inputs` of a request with `length` tokens."""
        given = iter(inputs)
        device = next((x.device for x in inputs if x is not None), torch.device("cpu"))
        parts = iter([mask(length, device) if mask else next(given) for mask in self._masks])
        args, kwargs = self._template
        args, kwargs = (_filled(value, parts, (self._tokens, length)) for value in (args, kwargs))
        return self._forward(*args, **kwargs)


def calls_op(module: Any) -> bool:
    return getattr(vars(module).get("forward"), "__func__", None) is _mix


def run_own_forwards(model: nn.Module) -> None:
    """Undo each `Mixer.install` in `model`."""
    module: Any
    for module in filter(calls_op, model.modules()):
        if module.forward_alone is None:
            del module.forward
        else:
            module.forward = module.forward_alone


def _mix(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that is a splitting op in steps."""
    inputs = _inputs(module, args, kwargs)
    output = _empty(module, list(_leaves([*args, *kwargs.values()])))
    torch.ops.piecegraph_hf.mixer(inputs, output, module.layer_name)
    return _returned(module, output)


def _inputs(module: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors of a call; None for one that this call does without, such as a mask of zeros."""
    leaves = list(_leaves([*args, *kwargs.values()]))
    return [leaves[i] for i in module.mixer_inputs]


def _empty(module: Any, leaves: list[Any]) -> Tensor:
    leaf, dim, shape, dtype = module.mixer_form
    value = leaves[leaf]
    tokens = value if dim < 0 else value.shape[dim]
    device = (next(module.parameters()) if dim < 0 else value).device
    # no new_empty: of the memory for another op it would count as a use of that
    return torch.empty([tokens if n == -1 else n for n in shape], dtype=dtype, device=device)


def _is_count(value: Any, tokens: int) -> bool:
    return type(value) is int and value == tokens


def _returned(module: Any, output: Tensor) -> Any:
    index, count, is_list = module.mixer_result
    items = [output if i == index else None for i in range(count)]
    return output if not count else items if is_list else tuple(items)


class _Called(nn.Module):
    """A call of `module` by another function."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.forward = module, forward


def _mask_of_request(
    mask: Mask, dims: int, dtype: torch.dtype, length: int, device: torch.device
) -> Tensor:
    """The mask of a request in the form of models: (1, …, length, length), added or boolean."""
    places = torch.arange(length, device=device)
    hidden = hidden_keys(places, places, mask).expand(*[1] * (dims - 2), -1, -1)
    if not dtype.is_floating_point:
        return ~hidden
    return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        elif isinstance(value, dict):
            yield from _leaves([*value.values()])
        else:
            yield value


def _filled(value: Any, tensors: Iterator[Tensor | None], counts: tuple[int, int]) -> Any:
    """`value` with other tensors in the places of its own, and another number of tokens."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        return type(value)([_filled(item, tensors, counts) for item in value])
    if isinstance(value, dict):
        return {name: _filled(item, tensors, counts) for name, item in value.items()}
    return counts[1] if _is_count(value, counts[0]) else value


def _run(inputs: list[Tensor | None], output: Tensor, name: str) -> None:
    context = get_forward_context()
    if context.metadata is None:
        raise MissingMetadata(layer_name=name)
    if name not in context.layers:
        raise LayerMissing(layer=name, known=", ".join(context.layers) or "none")
    context.layers[name](inputs, output, context.metadata)


LIBRARY.impl("mixer", _run, "CompositeExplicitAutograd")
torch.library.register_fake(MIXER_OP, lambda *args: None, lib=LIBRARY)
