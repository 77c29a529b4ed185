"""What a trace ran through: functions that Dynamo inlined, and what it took as constant.

Dynamo adds no guard for some of it: environment variables, functions that it calls while tracing,
attributes and keys whose absence the model handles.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

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


@contextmanager
def inlined_calls() -> Iterator[Inlined]:
    """Record each function that Dynamo inlines.

    Dynamo's own list lacks functions that raised an exception which their caller handled.
    """
    from torch._dynamo.exc import ObservedAttributeError, ObservedLookupError
    from torch._dynamo.symbolic_convert import (
        InliningInstructionTranslator,
        InstructionTranslatorBase,
    )
    from torch._dynamo.variables import builder
    from torch._dynamo.variables.functions import PolyfilledFunctionVariable, UserFunctionVariable
    from torch._dynamo.variables.misc import PythonModuleVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable
    from torch._guards import TracingContext

    inlined = Inlined()
    environments = (os.environ, getattr(os, "environb", os.environ))
    reads_variable = {environment.encodekey.__code__ for environment in environments}
    original = InliningInstructionTranslator.inline_call.__func__  # type: ignore[attr-defined]

    def inline_call(cls: Any, parent: Any, func: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        code = func.get_code()
        function = getattr(func, "fn", None)
        inlined.functions[code] = function if isinstance(function, FunctionType) else None
        if code in reads_variable:
            if (name := _variable_name(args)) is not None:
                inlined.variables.add(name)
            else:
                inlined.unnamed_variables.add(user_line(TracingContext.extract_stack()))
        return original(cls, parent, func, args, *rest, **kwargs)

    def watched(folding: Any, function_of: str) -> Any:
        original_call = folding.call_function

        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            function = getattr(self, function_of)
            if self.can_constant_fold_through() and _reads_state(function):
                given = _constants([*args, *kwargs.values()])
                if given is not None:
                    where = user_line(TracingContext.extract_stack())
                    inlined.results.append(FoldedCall(function, given, where))
            return original_call(self, tx, args, kwargs)

        return replaced(folding, "call_function", call_function)

    original_handler, handled = InstructionTranslatorBase.exception_handler, set[Any]()

    def exception_handler(self: Any, raised: Any) -> None:
        own = self.current_instruction.opname in ("RAISE_VARARGS", "RERAISE")
        if not own and isinstance(raised, _ABSENT) and raised not in handled:
            where = user_line(TracingContext.extract_stack())
            if (probe := _probe(raised, where)) is not None:
                inlined.probes.add(probe)
            else:
                inlined.absences.add(where)
        handled.add(raised)
        original_handler(self, raised)

    def asked(name: str) -> Any:
        original_access = getattr(PythonModuleVariable, name)

        def access(self: Any, tx: Any, attribute: str) -> Any:
            if (probe := _probe_of_module(self.value, attribute, name)) is not None:
                inlined.probes.add(probe)
            return original_access(self, tx, attribute)

        return replaced(PythonModuleVariable, name, access)

    def read_of_class(name: str) -> Any:
        original_read = getattr(UserDefinedClassVariable, name)

        def read(self: Any, tx: Any, attribute: str, *rest: Any) -> Any:
            if self.source is None:
                inlined.class_reads.add((self.value, attribute))
            return original_read(self, tx, attribute, *rest)

        return replaced(UserDefinedClassVariable, name, read)

    of_builder: Any = builder
    guard_of_both, original_bind = of_builder.make_dupe_guard, UserFunctionVariable.bind_args

    def make_dupe_guard(source: Any, known: Any) -> Any:
        guard = guard_of_both(source, known)
        if guard is None and known is not None and known != source:  # an argument and a global
            inlined.aliases.add(GuardFact(str(source.name), "DUPLICATE_INPUT", str(known.name)))
        return guard

    def bind_args(self: Any, parent: Any, *rest: Any) -> Any:
        source, effects = self.get_source(), parent.output.side_effects
        for index, cell in enumerate(self.fn.__closure__ or () if source is not None else ()):
            contents: Any = effects[cell].pre_existing_contents if cell in effects else None
            known = getattr(contents, "source", None)
            place = f"{source.name}.__closure__[{index}].cell_contents"
            if known is not None and place != str(known.name):
                inlined.aliases.add(GuardFact(place, SHARED_CELL, str(known.name)))
        return original_bind(self, parent, *rest)

    _ABSENT = (ObservedAttributeError, ObservedLookupError)
    with (
        ExitStack() as lookups,
        replaced(InliningInstructionTranslator, "inline_call", classmethod(inline_call)),
        replaced(InstructionTranslatorBase, "exception_handler", exception_handler),
        watched(TorchInGraphFunctionVariable, "value"),
        watched(PolyfilledFunctionVariable, "fn"),
        replaced(of_builder, "make_dupe_guard", make_dupe_guard),
        replaced(UserFunctionVariable, "bind_args", bind_args),
    ):
        for name in _MODULE_ACCESS & vars(PythonModuleVariable).keys():
            lookups.enter_context(asked(name))
        for name in _CLASS_ACCESS & vars(UserDefinedClassVariable).keys():
            lookups.enter_context(read_of_class(name))
        yield inlined


_MODULE_ACCESS = {"call_obj_hasattr", "var_getattr", "tp_getattro_impl"}
"""Methods by which Dynamo looks up an attribute of a module, by version of torch."""

_CLASS_ACCESS = {"call_obj_hasattr", "call_method", "var_getattr", "tp_getattro_impl"}
"""Methods by which Dynamo looks up an attribute of a class, by version of torch."""


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
