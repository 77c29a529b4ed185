"""The call of a splitting op between two graphs, with everything static bound beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compile.ir.writes import tensors_in
from ...errors import EagerResultChanged
from ...torch_compat.tensors import storage_id, tree_flatten, tree_leaves, tree_unflatten


def static_results(result: Any, args: Any) -> tuple[Any, dict[int, Tensor]]:
    """`result` with each fresh tensor replaced by a static copy, and these copies by position.

    A tensor that shares memory with an argument already is at a fixed place and stays.
    """
    given = {storage_id(tensor) for tensor in tensors_in(args)}
    targets: dict[int, Tensor] = {}
    leaves, spec = tree_flatten(result)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and storage_id(leaf) not in given:
            leaves[position] = targets[position] = _copy(leaf)
    return tree_unflatten(leaves, spec), targets


def _copy(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_like(tensor, requires_grad=False).copy_(tensor)


def eager_call(
    name: str,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    static: Any,
    targets: dict[int, Tensor],
) -> Callable[[], None]:
    """`fn` on its static arguments, its fresh results copied to the `targets` the next graph reads.

    Raises `EagerResultChanged` when a result's form is not what was captured, or when one that
    was in an argument's memory no longer is. An op that returns nothing is called as it is.
    """
    call = partial(fn, *args, **kwargs)
    if static is None:
        return call

    def forms(result: Any) -> list[Any]:
        leaves = enumerate(tree_leaves(result))
        return [_form(leaf, position in targets) for position, leaf in leaves]

    expected = forms(static)

    def call_and_copy() -> None:
        result = call()
        got = forms(result)
        if got != expected:
            raise EagerResultChanged(op=name, got=got, expected=expected)
        leaves = tree_leaves(result)
        for position, target in targets.items():
            target.copy_(leaves[position])

    return call_and_copy


def _form(leaf: Any, copied: bool) -> Any:
    """What must not change between capture and replay: of a tensor shape and dtype, and the
    address unless it is copied; anything else itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    return tuple(leaf.shape), leaf.dtype, None if copied else leaf.data_ptr()
