"""Repairs of wrong results in Inductor, active only during our compiles.

Each repair states what upstream does, the versions known to do it, and when the repair can go. Its
test compiles an example with stock torch as well and expects a wrong result there: once that test
fails, upstream is right and the repair can be deleted. The source of every repair is part of the
codegen key.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch

from ..basics.ops import mutated_arguments
from ..basics.patch import compiler_lock, replaced
from ..basics.tensors import tree_leaves


@contextmanager
def repaired_lowering() -> Iterator[None]:
    """Lower graphs with all repairs that change how operators are lowered."""
    with compiler_lock(), reads_before_mutations(), unshared_cat_parts(), slices_of_any_size():
        yield


@contextmanager
def reads_before_mutations() -> Iterator[None]:
    """Compute values that read a tensor before the custom op that then mutates it.

    Upstream: `FallbackKernel.create` registers such an op in the order of execution before it marks
    the tensor as mutated. Marking computes the pending pointwise reads of the old value, so a read
    that is used again later runs after the op and sees the new value.
    Affected: torch 2.11 to 2.15. Remove when `create` marks mutated tensors before it registers the
    operation.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    kernels: Any = ir.FallbackKernel
    original = vars(kernels)["create"]

    def create(cls: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(kernel, "_schema", None) is not None:
            for each in tree_leaves(mutated_arguments(kernel, args, kwargs)):
                if isinstance(each, ir.TensorBox):
                    each.realize()
                    V.graph.mark_buffer_mutated(each.get_name())
        return original.__func__(cls, kernel, *args, **kwargs)

    with replaced(kernels, "create", classmethod(create)):
        yield


@contextmanager
def unshared_cat_parts() -> Iterator[None]:
    """Copy the operands of a `cat` whose result is mutated.

    Upstream: `ConcatKernel.create` computes operands directly into the memory of the result. When
    the result is mutated, a later read of an operand sees the new value.
    Affected: torch 2.11 to 2.15. Remove when `create` copies operands that are read after a
    mutation of the result.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    concatenations: Any = ir.ConcatKernel
    original = vars(concatenations)["create"]

    def create(cls: Any, inputs: Any, dim: int) -> Any:
        if is_mutated(V.graph.current_node):
            inputs = [lowering.clone(each) for each in inputs]
        return original.__func__(cls, inputs, dim)

    with replaced(concatenations, "create", classmethod(create)):
        yield


@contextmanager
def slices_of_any_size() -> Iterator[None]:
    """Lower slices that may begin or end past the last row.

    Upstream: `slice_` cannot lower them if their size follows from that of the tensor, which it
    does in our traces. Affected: torch 2.11. Remove with that version.
    """
    if torch.__version__ >= "2.12":
        yield
        return
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    numbers: Any = sympy
    op: Any = torch.ops.aten.slice.Tensor
    original = lowering.lowerings[op]

    def slice_(x: Any, dim: int = 0, start: Any = 0, end: Any = None, step: Any = 1) -> Any:
        size = x.get_size()[dim]
        known: Any = V.graph.sizevars.guard_or_false

        def row(index: Any) -> Any:
            if known(numbers.Lt(index, 0)):
                return numbers.Max(index + size, 0)
            return numbers.Min(index, size) if known(numbers.Ge(index, 0)) else None

        first = row(numbers.sympify(start or 0))
        last = size if end is None else row(numbers.sympify(end))
        own_size = "unbacked_bindings" in V.graph.current_node.meta
        if own_size or first is None or last is None:
            return original(x, dim, start, end, step)
        # a difference: sympy does not evaluate nested Min and Max
        last = last if known(numbers.Ge(last, first)) else first + numbers.Max(last - first, 0)
        return original(x, dim, first, last, step, clamp=False)

    lowering.lowerings[op] = slice_
    try:
        yield
    finally:
        lowering.lowerings[op] = original


def is_mutated(node: torch.fx.Node) -> bool:
    """Whether anything in its graph may write to the result of `node`, also through a view."""
    from torch._library.utils import zip_schema

    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if user.op == "output":
            continue
        if schema is None:  # a part of several results, or an operation that may do anything
            if user.target is not operator.getitem or is_mutated(user):
                return True
            continue
        for argument, given in zip_schema(schema, user.args, user.kwargs):
            alias = argument.alias_info if node in tree_leaves(given) else None
            if alias is not None and (alias.is_write or is_mutated(user)):
                return True
    return False


REPAIRS = (reads_before_mutations, unshared_cat_parts, is_mutated)
"""Functions whose source is part of the codegen key: they change code, not torch's version."""


@contextmanager
def without_lost_cubins() -> Iterator[None]:
    """Drop the results of autotuning that have no cubin when a kernel is loaded.

    Upstream: `TritonBundler` stores the cubin of the configuration that won, and pickles the
    autotuner with the results of all of them. `load_autotuners` then fails for the others, logs
    a traceback, and does not use the statically launched kernel.
    Affected: torch 2.11 to 2.15. Remove when losing results are not pickled.
    """
    from torch._inductor.triton_bundler import TritonBundler

    bundler: Any = TritonBundler
    original = vars(bundler)["load_autotuners"]

    def has_cubin(result: Any) -> bool:
        try:
            result.reload_cubin_path()
        except RuntimeError:
            return False
        return True

    def load_autotuners(cls: Any, autotuners: Any) -> Any:
        for each in autotuners or ():
            kept = [result for result in each.kernel.compile_results if has_cubin(result)]
            each.kernel.compile_results = kept or each.kernel.compile_results
        return original.__func__(cls, autotuners)

    with replaced(bundler, "load_autotuners", classmethod(load_autotuners)):
        yield
