"""What a trace ran through: functions that Dynamo inlined, and what it took as constant.

Dynamo adds no guard for some of it: environment variables, functions that it calls while tracing,
attributes and keys whose absence the model handles.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch._guards import TracingContext

from ..basics.facts import SHARED_CELL, GuardFact
from ..basics.frames import user_line
from ..basics.patch import replaced


@dataclass(frozen=True)
class FoldedCall:
    """A call of a function that reads the state of the process, such as the rank."""

    function: Any
    arguments: tuple[Any, ...]
    where: str | None
    """file:line of the user's code."""


@dataclass
class Inlined:
    """The functions that a trace ran through, and the environment variables that they read."""

    functions: dict[CodeType, FunctionType | None] = field(default_factory=dict)
    """By code object; None where Dynamo made the function while tracing."""
    variables: set[str] = field(default_factory=set)
    unnamed_variables: set[str | None] = field(default_factory=set)
    """file:line of each read of a variable whose name is not constant."""
    absences: set[str | None] = field(default_factory=set)
    """file:line of each attribute, key or name whose absence the model handled, without a guard."""
    probes: set[GuardFact] = field(default_factory=set)
    """Attributes and keys whose absence the model handled, as guards that Dynamo did not add."""
    aliases: set[GuardFact] = field(default_factory=set)
    """Two expressions of one object, of which Dynamo guards only the value at one."""
    class_reads: set[tuple[type, str]] = field(default_factory=set)
    """Attributes, present or not, of classes whose origin Dynamo does not track: no guard is on
    them. A class that `__get__` of a descriptor is given is one."""
    results: list[FoldedCall] = field(default_factory=list)
    """Calls that Dynamo made while tracing, whose results it took as constant without a guard."""


_MODULE_ACCESS = {"call_obj_hasattr", "var_getattr", "tp_getattro_impl"}
"""Methods by which Dynamo looks up an attribute of a module, by version of torch."""

_CLASS_ACCESS = {"call_obj_hasattr", "call_method", "var_getattr", "tp_getattro_impl"}
"""Methods by which Dynamo looks up an attribute of a class, by version of torch."""


@contextmanager
def inlined_calls() -> Iterator[Inlined]:
    """Record each function that Dynamo inlines.

    Dynamo's own list lacks functions that raised an exception which their caller handled.
    """
    from torch._dynamo.symbolic_convert import (
        InliningInstructionTranslator,
        InstructionTranslatorBase,
    )
    from torch._dynamo.variables import builder
    from torch._dynamo.variables.functions import PolyfilledFunctionVariable, UserFunctionVariable
    from torch._dynamo.variables.misc import PythonModuleVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    inlined, handled = Inlined(), set[Any]()
    notes: list[tuple[Any, str, Callable[..., None]]] = [
        (InliningInstructionTranslator, "inline_call", partial(_note_function, inlined)),
        (InstructionTranslatorBase, "exception_handler", partial(_note_absence, inlined, handled)),
        (TorchInGraphFunctionVariable, "call_function", partial(_note_result, inlined, "value")),
        (PolyfilledFunctionVariable, "call_function", partial(_note_result, inlined, "fn")),
        (builder, "make_dupe_guard", partial(_note_alias, inlined)),
        (UserFunctionVariable, "bind_args", partial(_note_cells, inlined)),
    ]
    for name in _MODULE_ACCESS & vars(PythonModuleVariable).keys():
        notes.append((PythonModuleVariable, name, partial(_note_module_access, inlined, name)))
    for name in _CLASS_ACCESS & vars(UserDefinedClassVariable).keys():
        notes.append((UserDefinedClassVariable, name, partial(_note_class_access, inlined)))
    with ExitStack() as stack:
        for owner, name, note in notes:
            stack.enter_context(replaced(owner, name, _noting(owner, name, note)))
        yield inlined


def _noting(owner: Any, name: str, note: Callable[..., None]) -> Any:
    """The function `name` of `owner`; `note` is called first, with the same arguments."""
    static = inspect.getattr_static(owner, name)
    original = getattr(static, "__func__", static)

    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    return classmethod(call) if isinstance(static, classmethod) else call


def _note_function(
    inlined: Inlined, cls: Any, parent: Any, func: Any, args: Any, *_: Any, **__: Any
) -> None:
    code, function = func.get_code(), getattr(func, "fn", None)
    inlined.functions[code] = function if isinstance(function, FunctionType) else None
    if code in _reads_variable():
        if (name := _variable_name(args)) is not None:
            inlined.variables.add(name)
        else:
            inlined.unnamed_variables.add(_traced_line())


def _note_absence(inlined: Inlined, handled: set[Any], translator: Any, raised: Any) -> None:
    from torch._dynamo.exc import ObservedAttributeError, ObservedLookupError

    by_the_user = translator.current_instruction.opname in ("RAISE_VARARGS", "RERAISE")
    absent = isinstance(raised, (ObservedAttributeError, ObservedLookupError))
    if absent and not by_the_user and raised not in handled:
        where = _traced_line()
        if (probe := _probe(raised, where)) is not None:
            inlined.probes.add(probe)
        else:
            inlined.absences.add(where)
    handled.add(raised)


def _note_result(
    inlined: Inlined, function_of: str, variable: Any, tx: Any, args: Any, kwargs: Any
) -> None:
    function = getattr(variable, function_of)
    folded = variable.can_constant_fold_through() and _reads_state(function)
    constants = _constants([*args, *kwargs.values()]) if folded else None
    if constants is not None:
        inlined.results.append(FoldedCall(function, constants, _traced_line()))


def _note_alias(inlined: Inlined, source: Any, first: Any) -> None:
    """Dynamo adds no guard if one is an argument and the other a global."""
    if first is not None and first != source:
        inlined.aliases.add(GuardFact(str(source.name), "DUPLICATE_INPUT", str(first.name)))


def _note_cells(inlined: Inlined, variable: Any, parent: Any, *_: Any) -> None:
    source, effects = variable.get_source(), parent.output.side_effects
    for index, cell in enumerate(variable.fn.__closure__ or () if source is not None else ()):
        contents: Any = effects[cell].pre_existing_contents if cell in effects else None
        first = getattr(contents, "source", None)
        place = f"{source.name}.__closure__[{index}].cell_contents"
        if first is not None and place != str(first.name):
            inlined.aliases.add(GuardFact(place, SHARED_CELL, str(first.name)))


def _note_module_access(
    inlined: Inlined, access: str, variable: Any, tx: Any, attribute: str
) -> None:
    if (probe := _probe_of_module(variable.value, attribute, access)) is not None:
        inlined.probes.add(probe)


def _note_class_access(inlined: Inlined, variable: Any, tx: Any, attribute: str, *_: Any) -> None:
    if variable.source is None:
        inlined.class_reads.add((variable.value, attribute))


def _traced_line() -> str | None:
    return user_line(TracingContext.extract_stack())


def _reads_variable() -> set[CodeType]:
    """The code that reads an environment variable."""
    environments = (os.environ, getattr(os, "environb", os.environ))
    return {environment.encodekey.__code__ for environment in environments}


def _probe_of_module(module: ModuleType, attribute: str, access: str) -> GuardFact | None:
    """That a module has an attribute or not, as a guard; what it has is guarded if it is read.

    Submodules are left out: they depend on what was imported.
    """
    if sys.modules.get(module.__name__) is not module:
        return None
    absent = object()
    held = getattr(module, attribute, absent)
    is_read = held is not absent and access != "call_obj_hasattr"
    if is_read or isinstance(held, ModuleType):
        return None
    return GuardFact(f"__import__({module.__name__!r})", "HASATTR", attribute)


def _probe(raised: BaseException, where: str | None) -> GuardFact | None:
    """What was absent, as a guard, from the frames of Dynamo that raised an exception."""
    frames: list[dict[str, Any]] = []
    trace = raised.__traceback__
    while trace is not None:
        frames.insert(0, trace.tb_frame.f_locals)
        trace = trace.tb_next
    for names in frames:
        source = getattr(names.get("self"), "source", None)
        if source is None:
            continue
        if isinstance(names.get("name"), str) and "AttributeError" in type(raised).__name__:
            return GuardFact(str(source.name), "HASATTR", names["name"], where)
        key = _constants([names[n] for n in ("arg", "key") if n in names])
        if key and "KeyError" in type(raised).__name__:
            return GuardFact(str(source.name), "DICT_CONTAINS", key[0], where)
        if "IndexError" in type(raised).__name__:
            return GuardFact(str(source.name), "SEQUENCE_LENGTH", None, where)
    return None


_BY_ARGUMENTS = "decided by the arguments, and by the device, which is a factor of the key"
_IN_KEY = "a factor of the key"
STATELESS: Mapping[str, str] = {
    **dict.fromkeys(
        [
            *("is_complex", "is_floating_point", "promote_types", "get_enum", "_assert", "intern"),
            *("get_device_properties", "_get_device_index"),
        ],
        _BY_ARGUMENTS,
    ),
    **dict.fromkeys(
        [
            *("is_autocast_enabled", "is_autocast_cpu_enabled", "_is_any_autocast_enabled"),
            *("get_autocast_dtype", "get_autocast_gpu_dtype", "get_default_dtype"),
        ],
        _IN_KEY,
    ),
}
"""Functions that Dynamo calls while tracing whose results need no condition, each with a reason."""


def _reads_state(function: Any) -> bool:
    """Whether a function that Dynamo calls while tracing depends on more than its arguments."""
    home = str(getattr(function, "__module__", None) or "torch").partition(".")[0]
    return home in ("torch", "sys") and function.__name__ not in STATELESS


def _constants(variables: Any) -> tuple[Any, ...] | None:
    try:
        return tuple(each.as_python_constant() for each in variables)
    except Exception:  # not a constant: Dynamo does not call the function
        return None


def _variable_name(args: Any) -> str | None:
    try:
        return os.fsdecode(args[-1].as_python_constant())
    except Exception:  # not a constant
        return None
