"""Operators: names, overloads, schemas, writes, fake implementations, Triton launches."""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import Thread
from types import CellType, FrameType, FunctionType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.node import map_arg

from .frames import is_torch_file
from .patch import replaced

__all__ = ["HigherOrderOperator", "OpOverload"]


def is_op(target: Any) -> bool:
    """Whether `target` is an operator: one overload, or the packet of all overloads."""
    return isinstance(target, (OpOverload, OpOverloadPacket))


def without_frame(op: Any) -> Any:
    """What calling an overload calls: the same without a Python frame. Anything else as it is."""
    return op._op if type(op) is OpOverload else op


def op_name(op: Any) -> str:
    """`ns::op`, for an overload as for the packet."""
    return str(_packet(op)._qualified_op_name)


def overload_name(op: OpOverload) -> str:
    """`ns::op.overload`."""
    return f"{op_name(op)}.{op._overloadname}"


def overloads(op: Any) -> list[Any]:
    """All overloads of the operator, of which `op` may be one."""
    packet = _packet(op)
    return [getattr(packet, name) for name in packet.overloads()]


def overload_of(node: torch.fx.Node) -> Any:
    """The overload that a node of a trace calls: by its packet the one that torch chooses by the
    arguments."""
    op: Any = node.target
    if isinstance(op, OpOverload):
        return op
    names = op.overloads()
    if len(names) > 1:
        given = map_arg((node.args, node.kwargs), lambda each: each.meta["example_value"])
        names = [torch._C._jit_resolve_packet(op_name(op), *given[0], **given[1])]
    return getattr(op, names[0])


def _packet(op: Any) -> Any:
    return op.overloadpacket if isinstance(op, OpOverload) else op


def schemas(op: Any) -> list[str]:
    """The schema of every overload, as text."""
    return [str(overload._schema) for overload in overloads(op)]


COLLECTIVES = "c10d"
"""The namespace of the ops of `torch.distributed`, which return before they have ended."""

_FUNCTIONAL = "_c10d_functional"
"""The namespace of those that return a tensor to wait for."""

_MEETINGS = frozenset({COLLECTIVES, _FUNCTIONAL, "_dtensor", "symm_mem"})


def is_distributed(op: Any) -> bool:
    """Whether it may return before it has ended, or wait for one that has not."""
    return op.namespace in _MEETINGS


def is_collective(op: Any) -> bool:
    """Whether ranks may wait for each other in `op`: of `torch.distributed`, and takes a group."""
    return is_distributed(op) and any("group" in each.name for each in op._schema.arguments)


def returns_early(op: OpOverload) -> bool:
    """Whether it is a collective that may not have ended when it returns, see `awaited`."""
    functional = op.namespace == _FUNCTIONAL and is_collective(op)
    return op.namespace == COLLECTIVES or functional


def awaited(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call a collective of `torch.distributed` and wait until it has ended: for its work, or for
    the tensors that a functional one returns."""
    result = CALL_OP(op, *args, **kwargs)
    if op.namespace == COLLECTIVES:
        (result[-1] if isinstance(result, tuple) else result).wait()
    else:
        for tensor in result if isinstance(result, list) else [result]:
            getattr(torch.ops, _FUNCTIONAL).wait_tensor(tensor)
    return result


def is_mutable(op: OpOverload) -> bool:
    """Whether the schema of `op` says that it writes to an argument, or could not say it."""
    return bool(op._schema.is_mutable or op.namespace == COLLECTIVES or _hidden_writes(op))


@cache
def _hidden_writes(op: OpOverload, off: frozenset[str] = frozenset()) -> frozenset[str]:
    """The arguments that torch knows `op` to write in training, though its schema does not say so.

    `off` are flags that are not set. Which one is that of training torch knows, too.
    """
    arguments = op._schema.arguments
    flags = (each.name for each in arguments if str(each.type) == "bool")
    info = torch._C._SchemaInfo(op._schema)
    info.add_argument_values({name: name not in off for name in flags})
    unsaid = (each.name for each in arguments if each.alias_info is None)
    return frozenset(name for name in unsaid if info.is_mutable(name))


@cache
def hides_writes(name: str) -> bool:
    """Whether a function of torch with this name, such as `batch_norm`, calls such an op."""
    packet = getattr(torch.ops.aten, name, None)
    return isinstance(packet, OpOverloadPacket) and any(map(_hidden_writes, overloads(packet)))


def returns_new_memory(op: OpOverload) -> bool:
    """Whether its schema says so of each result."""
    return not any(each.alias_info for each in op._schema.returns)


def returns_nothing(op: OpOverload) -> bool:
    """Whether the schema of `op` says that it has no result, as that of an assertion."""
    return not op._schema.returns


def given_arguments(op: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, bool]]:
    """Each argument of a call of `op`, and whether `op` writes to it according to its schema.

    Schemas of collectives state no writes: any argument of theirs may be written. That of a batch
    norm does not say that it writes running statistics in training.
    """
    if hidden := _hidden_writes(op):
        names = (each.name for each in op._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden = _hidden_writes(op, frozenset(name for name in given if given[name] is False))
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args) or argument.name in kwargs:
            value = args[position] if position < len(args) else kwargs[argument.name]
            alias = argument.alias_info
            may_write = op.namespace == COLLECTIVES or argument.name in hidden
            yield value, may_write or (alias is not None and bool(alias.is_write))


def scalar_and_size_arguments(op: Any, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """The arguments of a call of `op` by their type: numbers and tensors, then sizes (SymInt).

    What an operator of others does with an integer is not known: it is a number.
    """
    numbers, sizes = list[Any](), list[Any]()
    for position, argument in enumerate(op._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_size = "int" in str(argument.type) and op.namespace in ("aten", "prims")
        (sizes if is_size else numbers).append(value)
    return numbers, sizes


def mutated_arguments(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments of a call of `op` that it writes to."""
    if not is_mutable(op):
        return []
    return [value for value, written in given_arguments(op, args, kwargs) if written]


def call_kernel(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Call the kernel of `op` for the device of its tensors: modes see the ops inside, not `op`."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    key = torch._C._dispatch_key_for_device(tensors[0].device.type if tensors else "cpu")
    return run_kernel(op, key, args, kwargs)


def custom_op_function(name: str) -> Callable[..., Any] | None:
    """The Python function behind an op made by `torch.library.custom_op`; else None."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(name)
    return definition._init_fn if definition else None


def triton_call(node: torch.fx.Node) -> tuple[Any, dict[str, Any]] | None:
    """The kernel and the arguments of a node that launches a Triton kernel; else None.

    The node itself refers to both by their index in a table of this process.
    """
    if not str(node.target).startswith("triton_kernel_wrapper"):
        return None
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kwargs: dict[str, Any] = dict(node.kwargs)
    kernel = kernel_side_table.get_kernel(kwargs.pop("kernel_idx"))
    constants = kernel_side_table.get_constant_args(kwargs.pop("constant_args_idx"))
    return kernel, {**kwargs, "constants": dict(constants)}


def triton_writes(node: torch.fx.Node, kwargs: dict[str, Any]) -> list[Any] | None:
    """The values of `kwargs` that a Triton launch writes to; None for other nodes."""
    if not str(node.target).startswith("triton_kernel_wrapper"):
        return None
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors

    given = kwargs["kwargs"]
    table = (kwargs["kernel_idx"], kwargs["constant_args_idx"])
    names = get_mutated_tensors(*table, given, kwargs["tma_descriptor_metadata"])
    return [given[name] for name in names]


def fake_function(name: str) -> Callable[..., Any] | None:
    """The fake implementation of `ns::op`, if one is registered."""
    from torch._library.custom_ops import OPDEFS
    from torch._library.simple_registry import singleton

    definition = OPDEFS.get(name)
    kernel = singleton.find(name).fake_impl.kernel
    fake: Callable[..., Any] | None = kernel.func if kernel is not None else None
    return _registered(fake) if definition is None else definition._abstract_fn


def _registered(fake: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The user's function inside torch's wrapper, whose closure changes at the first call."""
    if fake is None or "_check_pystubs_once" not in fake.__qualname__:
        return fake
    inside: Callable[..., Any] = inspect.getclosurevars(fake).nonlocals["func"]
    return inside


def traced_kernels(op: OpOverload) -> list[str]:
    """The dispatch keys at which Python code outside of torch runs while calls of `op` are traced.

    What is registered for a device is called when the model runs, as it is then.
    """
    return [
        key
        for key, (file, _) in _python_kernels(op).items()
        if not (key.startswith(_DEVICES) or is_torch_file(file))
    ]


def python_for_all_devices(op: Any) -> str | None:
    """file:line of the kernel of `op`, if it is Python code for every device: calls of other
    operators, which a compiler could see. None for other operators."""
    function = custom_op_function(op_name(op))
    kernel = _python_kernels(op).get("CompositeExplicitAutograd")
    if kernel is None or function is None:
        return kernel and ":".join(kernel)
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def is_in_python(op: OpOverload) -> bool:
    """Whether the kernel of `op` for a CPU is Python code."""
    return not {"CPU", "CompositeExplicitAutograd"}.isdisjoint(_python_kernels(op))


def _python_kernels(op: OpOverload) -> dict[str, tuple[str, str]]:
    """File and line of the Python code that registered each kernel of `op`, by dispatch key."""
    known: str = torch._C._dispatch_dump(str(op._name))
    registered = r"^(?!debug)(\w+)(?:\[alias\])?: registered at (.+\.py):(\d+)"
    return {key: (file, line) for key, file, line in re.findall(registered, known, re.MULTILINE)}


_DEVICES = ("CPU", "CUDA", "HIP", "XPU", "MPS", "MTIA", "HPU", "XLA", "PrivateUse")


def overridden_ops() -> list[tuple[OpOverload, str]]:
    """Operators of torch for which a program has registered a kernel, and the dispatch keys."""
    found = []
    for entry in sorted(torch.library._impls):
        namespace, name, key = entry.split("/")
        if namespace == "aten" and key != "Meta":
            op = getattr(torch.ops.aten, name.partition(".")[0])
            overload = getattr(op, name.partition(".")[2] or "default")
            found += [(overload, each) for each in traced_kernels(overload) if each == key]
    return found


_TABLES = {
    "torch._decomp": "decomposition_table",
    "torch._inductor.decomposition": "decompositions",
    "torch._inductor.lowering": "lowerings",
}
"""By module, a dict of the functions by which torch compiles ops."""


def registered_rules() -> dict[str, Any]:
    """Functions that a program has registered to compile ops with, by table and op.

    A module that is not loaded has torch's own.
    """
    found = {}
    for name, table in _TABLES.items():
        for op, rule in getattr(sys.modules.get(name), table, {}).items():
            if (function := _rule_of_a_program(rule)) is not None:
                found[f"{name}[{op}]"] = function
    return found


@cache
def _rule_of_a_program(rule: Any) -> Any:
    """The function that a program registered; None for one of torch's. There are thousands, and
    each key asks."""
    function = inspect.unwrap(rule) if hasattr(rule, "__wrapped__") else rule
    code = getattr(function, "__code__", None)
    return None if code is None or is_torch_file(code.co_filename) else function


class _Found(Exception):
    """Ends a call of a kernel before any of its code runs."""


def registered_function(op: OpOverload, key: str) -> tuple[FunctionType, dict[str, Any]] | None:
    """The Python function that is registered for `op` at a dispatch key, and what it is bound to.

    The dispatcher keeps it where Python cannot read it: the kernel is called, and stopped when its
    frame begins. None if no Python function is called.
    """
    frames: list[FrameType] = []

    def stop(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            frames.append(frame)
            raise _Found

    arguments = [_dummy(str(argument.type)) for argument in op._schema.arguments]
    args = [v for v, a in zip(arguments, op._schema.arguments, strict=True) if not a.kwarg_only]
    kwargs = {
        a.name: v for v, a in zip(arguments, op._schema.arguments, strict=True) if a.kwarg_only
    }

    def call() -> None:
        sys.setprofile(stop)
        try:
            op._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)
        except Exception:  # _Found, or the error of a kernel that is no Python function
            pass
        finally:
            sys.setprofile(None)

    # In a thread of its own, whose profiler it is: that of the caller may be a C function, as
    # cProfile's, which cannot be set again.
    collects = gc.isenabled()
    gc.disable()  # a collection calls functions of its own, which would be taken for the kernel
    try:
        thread = Thread(target=call)
        thread.start()
        thread.join()
    finally:
        if collects:
            gc.enable()
    if not frames:
        return None
    code, values = frames[0].f_code, frames[0].f_locals
    cells = [CellType(values[n]) if n in values else CellType() for n in code.co_freevars]
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = {id(value) for value in arguments}
    bound = {n: values[n] for n in names if n in values and id(values[n]) not in given}
    return FunctionType(code, frames[0].f_globals, code.co_name, None, tuple(cells)), bound


def _dummy(kind: str) -> Any:
    """A value of a type of arguments."""
    if kind.startswith("List"):
        return []
    plain = {"int": 0, "SymInt": 0, "number": 0, "float": 0.0, "bool": False, "str": ""}
    return torch.empty(0, device="cpu") if kind == "Tensor" else plain.get(kind)


def is_composite(op: OpOverload) -> bool:
    """Whether `op` is only a composition of other operators.

    Of `native_batch_norm` and others that have a kernel, torch notes a decomposition beside it.
    """
    has = op.has_kernel_for_dispatch_key
    return has(_key("CompositeImplicitAutograd")) and not has(_key("CPU"))


def is_python_op(op: torch._ops.OpOverload) -> bool:
    """Whether running `op` on a CPU runs a kernel that was registered for it, not its parts.

    `torch.library.custom_op` without device types registers a kernel for all devices.
    """
    keys = "CPU", "CompositeExplicitAutograd"
    return any(op.has_kernel_for_dispatch_key(_key(name)) for name in keys)


def run_kernel(op: OpOverload, device: str, args: Any, kwargs: Any) -> Any:
    """Run the kernel of `op` for `device` (CPU, CUDA) without dispatching the call to modes.

    Operators that the kernel calls are dispatched to the active modes.
    """
    return op.redispatch(torch._C.DispatchKeySet(_key(device)), *args, **kwargs)


def run_higher_order(op: Any, args: Any, kwargs: Any) -> Any:
    """Run the kernel of an operator of higher order: modes see the operators that it calls.

    Some kernels, such as that of `scan`, refuse to run in a mode: they are told of none.
    """
    kernel = op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
    names = kernel.__globals__ | {"_get_current_dispatch_mode": lambda: None}
    told = FunctionType(kernel.__code__, names, None, kernel.__defaults__, kernel.__closure__)
    return told(*args, **kwargs)


CALL_OP: Callable[..., Any] = OpOverload.__call__
"""Calls an operator as it is, also inside `ops_through`."""


@contextmanager
def ops_through(calls: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Call `calls[op]` in place of an operator or a packet. A function mode would do the same, and
    a compiled region that was first called in it would be compiled once more outside."""
    with ExitStack() as classes:
        for kind in (OpOverload, OpOverloadPacket) if calls else ():
            call = _replacing(kind.__call__, calls)
            classes.enter_context(replaced(kind, "__call__", call))
        yield


def _replacing(original: Callable[..., Any], calls: Mapping[Any, Any]) -> Callable[..., Any]:
    def call(op: Any, /, *args: Any, **kwargs: Any) -> Any:
        other = calls.get(op)
        return original(op, *args, **kwargs) if other is None else other(*args, **kwargs)

    return call


def is_higher_order(op: Any) -> bool:
    """Whether `op` calls functions that it is given."""
    return isinstance(op, HigherOrderOperator)


def branches_by_value(op: Any, args: Any) -> bool:
    """Whether an operator of higher order reads a tensor on the host to choose what it runs."""
    return op.name() == "while_loop" or (op.name() == "cond" and isinstance(args[0], torch.Tensor))


def _key(name: str) -> torch._C.DispatchKey:
    key: torch._C.DispatchKey = getattr(torch._C.DispatchKey, name)
    return key
