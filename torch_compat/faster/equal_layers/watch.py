"""What Dynamo does while it traces: functions of Dynamo that are replaced during a trace.

The signature of each is (calls of the trace, original function, *arguments of the original).
"""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    UserDefinedObjectVariable,
    functions,
    nn_module,
    torch_function,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._library.opaque_object import should_hoist

from ...basics.patch import replaced
from .calls import Calls
from .names import OPAQUE_CLASS, LabelVariable, NameVariable, text

Call = Callable[..., Any]
_LAZY_VALUES = "computed_lazy_constant_max_nodes"


def _call_module(calls: Calls, original: Call, variable: Any, tx: Any, *args: Any) -> Any:
    return calls.call(functools.partial(original, variable), variable, tx, *args)


def _build(calls: Calls, original: Call, builder: Any, value: Any) -> Any:
    calls.begin(builder.tx.output)
    variable = original(builder, value)
    calls.read(builder.source, value, variable)
    return variable


def _create_lazy(calls: Calls, original: Call, value: Any, source: Any, **options: Any) -> Any:
    calls.read(source, value, None)
    return original(value, source, **options)


def _wrap(calls: Calls, original: Call, builder: Any, value: Any) -> Any:
    variable = original(builder, value)
    if calls.region and type(value) is str and type(variable) is ConstantVariable:
        expressions = frozenset([text(builder.source)])
        of_names: Any = {"names": calls.names, "expressions": expressions}
        return NameVariable(value, source=builder.source, **of_names)
    return variable


def _make_object(
    calls: Calls, original: Call, variable: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """An object of a type that is opaque to torch."""
    if calls.region:
        calls.region.labels.add(variable.value)
    kinds = {*map(type, args)} if should_hoist(variable.value) and not kwargs else set()
    if NameVariable not in kinds or not kinds <= {NameVariable, ConstantVariable}:
        return original(variable, tx, args, kwargs)
    plain = [
        ConstantVariable.create(arg.passed(), source=arg.source)
        if type(arg) is NameVariable
        else arg
        for arg in args
    ]
    label = original(variable, tx, plain, kwargs)
    sources = label.ctor_arg_sources
    return LabelVariable(
        *(label.proxy, label.value, label.ctor_args_kwargs),
        ctor_arg_sources=sources,
        names=calls.names,
        expressions=frozenset(text(source) for source in sources if source is not None),
    )


def _has_torch_function(calls: Calls, original: Call, variable: Any) -> Any:
    """Answer without marking the value as inspected: Dynamo asks for each argument of an op."""
    if type(variable) is LabelVariable:
        return hasattr(variable.passed(), "__torch_function__")
    return original(variable)


def _inline(calls: Calls, original: Call, parent: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    if calls.region:
        calls.region.functions.add(getattr(func, "fn", func.get_code()))
    return original(parent, func, *args, **kwargs)


def _load_attr(
    calls: Calls, original: Call, effects: Any, item: Any, *args: Any, **kwargs: Any
) -> Any:
    if calls.region and "Existing" in type(item.mutation_type).__name__:
        calls.region.obstacle = "reads an attribute that the model changed"
    return original(effects, item, *args, **kwargs)


def _look_inside(calls: Calls, original: Call, *args: Any, **kwargs: Any) -> Any:
    """A function of Dynamo that looks into objects without a read."""
    if calls.region:
        calls.region.obstacle = "looks into an object"
    return original(*args, **kwargs)


def _open(calls: Calls, original: Call, variable: Any, *args: Any) -> Any:
    """The `__dict__` of an object: what was read of it before shows in no read."""
    if isinstance(variable.value, torch.nn.Module):
        return _look_inside(calls, original, variable, *args)
    return original(variable, *args)


def _is_instance(calls: Calls, original: Call, dynamo: Any, tx: Any, value: Any, kinds: Any) -> Any:
    """`isinstance` may run code of the model, which Dynamo calls instead of tracing it."""
    classes = kinds.as_python_constant()
    checks = {
        type(kind).__instancecheck__ for kind in (classes if type(classes) is tuple else (classes,))
    }
    if checks <= {type.__instancecheck__, ABCMeta.__instancecheck__}:
        return original(dynamo, tx, value, kinds)
    return _look_inside(calls, original, dynamo, tx, value, kinds)


_HOOKS: tuple[tuple[Any, str, Call], ...] = (
    (nn_module.UnspecializedNNModuleVariable, "call_function", _call_module),
    (VariableBuilder, "__call__", _build),
    (VariableBuilder, "_wrap", _wrap),
    (LazyVariableTracker, "create", _create_lazy),
    (OPAQUE_CLASS, "call_function", _make_object),
    (torch_function, "has_torch_function", _has_torch_function),
    (InliningInstructionTranslator, "inline_call", _inline),
    (SideEffects, "load_attr", _load_attr),
    (functions, "invoke_and_store_as_constant", _look_inside),
    (nn_module, "invoke_and_store_as_constant", _look_inside),
    (UserDefinedObjectVariable, "get_dict_vt", _open),
    (BuiltinVariable, "call_isinstance", _is_instance),
)


@contextmanager
def watched(calls: Calls) -> Iterator[None]:
    """Trace with all hooks."""
    # from torch 2.14 on a value made of constants does not show that they were looked at
    without_lazy_values = {name: 0 for name in [_LAZY_VALUES] if hasattr(dynamo_config, name)}
    with ExitStack() as stack:
        stack.enter_context(dynamo_config.patch(without_lazy_values))
        # of functions that were not replaced
        stack.enter_context(replaced(BuiltinVariable, "call_function_handler_cache", {}))
        for owner, name, hook in _HOOKS:
            stack.enter_context(replaced(owner, name, _with_hook(calls, owner, name, hook)))
        yield


def _with_hook(calls: Calls, owner: Any, name: str, hook: Call) -> Any:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(calls, original, *args, **kwargs)

    before = inspect.getattr_static(owner, name)
    if isinstance(before, classmethod):
        return classmethod(lambda cls, *args, **kwargs: call(*args, **kwargs))
    return staticmethod(call) if isinstance(before, staticmethod) else call
