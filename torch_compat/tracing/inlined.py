"""What a trace ran through: functions that Dynamo inlined, and what it took as constant.

Dynamo adds no guard for some of it: environment variables, functions that it calls while tracing,
attributes and keys whose absence the model handles, the order of sets, identity of equal constants.
"""

from __future__ import annotations

import inspect
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch._guards import TracingContext

from ..basics.facts import CALLED, CLASS_CHECK, FALLBACK, SHARED_CELL, GuardFact
from ..basics.frames import is_torch_file, user_line
from ..basics.patch import replaced


@dataclass(frozen=True)
class FoldedCall:
    """A call that Dynamo made while tracing, of a function that reads the state of the process."""

    function: Any
    arguments: tuple[Any, ...] | None
    """None if they are not constant, those by name included."""
    named: Mapping[str, Any]
    where: str | None
    """file:line of the user's code."""


@dataclass
class Inlined:
    """The functions that a trace ran through, and the environment variables that they read."""

    functions: dict[CodeType, FunctionType | None] = field(default_factory=dict)
    """By code object; None where Dynamo made the function while tracing."""
    called: set[CodeType] = field(default_factory=set)
    """Functions that the model makes and native code calls while tracing."""
    variables: set[str] = field(default_factory=set)
    obstacles: set[tuple[str, str | None]] = field(default_factory=set)
    """What cannot be stated as a condition, and file:line of the user's code."""
    facts: set[GuardFact] = field(default_factory=set)
    """What Dynamo relied on without a guard, as guards: attributes and keys whose absence the model
    handled, two expressions of one object, containers that were iterated, parts of functions."""
    wrapped: set[str] = field(default_factory=set)
    """Expressions whose values Dynamo read. It adds no guard on some of them."""
    class_reads: set[tuple[type, str]] = field(default_factory=set)
    """Attributes, present or not, of classes whose origin Dynamo does not track: no guard is on
    them. A class that `__get__` of a descriptor is given is one."""
    ordered: list[tuple[Any, ...]] = field(default_factory=list)
    """Items of lists that the model makes sets of: Dynamo keeps their order in every process."""
    results: list[FoldedCall] = field(default_factory=list)
    """Calls that Dynamo made while tracing, whose results it took as constant without a guard."""

    def rely(self, source: Any, kind: str, argument: Any = None, part: str = "") -> None:
        """A fact of the line that is traced, about a value of Dynamo or a part of it."""
        self.facts.add(GuardFact(f"{source.name}{part}", kind, argument, _traced_line()))

    def refuse(self, what: str) -> None:
        """An obstacle in the line that is traced."""
        self.obstacles.add((what, _traced_line()))


_ACCESS = {"call_obj_hasattr", "var_getattr", "tp_getattro_impl"}
"""Methods by which Dynamo looks up an attribute of a module or class, by version of torch."""


@contextmanager
def inlined_calls() -> Iterator[Inlined]:
    """Record each function that Dynamo inlines.

    Dynamo's own list lacks functions that raised an exception which their caller handled.
    """
    from torch._dynamo import symbolic_convert, variables

    inlined, handled = Inlined(), set[Any]()
    function, in_graph = variables.UserFunctionVariable, variables.TorchInGraphFunctionVariable
    polyfilled = variables.functions.PolyfilledFunctionVariable
    notes: list[tuple[Any, str, Callable[..., None]]] = [
        (symbolic_convert.InliningInstructionTranslator, "inline_call", _note_function),
        (
            symbolic_convert.InstructionTranslatorBase,
            "exception_handler",
            partial(_note_absence, handled),
        ),
        (in_graph, "call_function", partial(_note_result, "value")),
        (polyfilled, "call_function", partial(_note_result, "fn")),
        (function, "call_function", _note_kept_result),
        (function, "as_python_constant", _note_called),
        (variables.NestedUserFunctionVariable, "as_python_constant", _note_called),
        (variables.UserMethodVariable, "call_function", _note_kept_result),
        (function, "bind_args", _note_cells),
        (
            variables.UnspecializedNNModuleVariable,
            "manually_trace_nn_module_getattr",
            _note_fallback,
        ),
        (variables.SuperVariable, "_resolved_getattr_and_source", _note_super),
        (variables.builder, "make_dupe_guard", _note_alias),
        (variables.builder.VariableBuilder, "__call__", _note_wrapped),
        (variables.BuiltinVariable, "call_function", _note_builtin),
    ]
    if (of_vars := getattr(variables.dicts, "SideEffectsProxyDict", None)) is not None:
        # torch 2.11 does not trace a function that iterates the `__dict__` of an object
        notes += [(of_vars, "__iter__", _note_keys), (of_vars, "__contains__", _note_key)]
    read_part = next(name for name in _PART_ACCESS if hasattr(function, name))
    notes += [(each, read_part, _note_part) for each in (function, variables.ConstantVariable)]
    module, cls = variables.PythonModuleVariable, variables.UserDefinedClassVariable
    notes += [(module, n, partial(_note_module_access, n)) for n in _ACCESS & vars(module).keys()]
    notes += [(cls, n, _note_class_access) for n in {*_ACCESS, "call_method"} & vars(cls).keys()]
    sets = getattr(variables, "sets", variables.dicts)  # torch 2.11 has them among its dicts
    kinds = [each for each in vars(sets).values() if "set" in getattr(each, "__name__", "").lower()]
    notes += {  # torch 2.11 has the methods in the parent of sets and dicts
        (next(owner for owner in kind.__mro__ if name in vars(owner)), name, _note_order)
        for kind in kinds
        if isinstance(kind, type) and kind.__module__ == sets.__name__
        for name in _SET_ORDER
        if hasattr(kind, name)
    }
    notes += [(sets.SetVariable, "call_method", _note_popped)]
    notes += [(variables.ListVariable, "call_method", _note_extended)]
    notes += [(variables.ConstDictVariable, "call_method", _note_joined)]
    comparisons = _noted_comparisons(inlined, symbolic_convert.compare_op_handlers)
    with ExitStack() as stack:
        stack.enter_context(replaced(symbolic_convert, "compare_op_handlers", comparisons))
        for owner, name, note in notes:
            noted = _noting(owner, name, partial(note, inlined))
            stack.enter_context(replaced(owner, name, noted))
        yield inlined


def _noting(owner: Any, name: str, note: Callable[..., None]) -> Any:
    """The function `name` of `owner`; `note` is called first, with the same arguments."""
    static = inspect.getattr_static(owner, name)
    original = getattr(static, "__func__", static)

    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    return classmethod(call) if isinstance(static, classmethod) else call


def _noted_comparisons(inlined: Inlined, handlers: Mapping[str, Any]) -> dict[str, Any]:
    """The functions by which Dynamo runs `is` and the like."""

    def noted(original: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        _note_identity(inlined, tx, args)
        return original(tx, args, kwargs)

    return {**handlers, **{name: partial(noted, handlers[name]) for name in ("is", "is not")}}


def _note_function(
    inlined: Inlined, cls: Any, parent: Any, func: Any, args: Any, *_: Any, **__: Any
) -> None:
    code, function = func.get_code(), getattr(func, "fn", None)
    inlined.functions[code] = function if isinstance(function, FunctionType) else None
    if code.co_name == "__getattr__" and (names := _constants(args[1:])):
        _note_fallback(inlined, args[0], None, *names)
    if code in _reads_variable():
        if (name := _variable_name(args)) is not None:
            inlined.variables.add(name)
        else:
            inlined.refuse("an environment variable whose name is not constant")


def _note_absence(handled: set[Any], inlined: Inlined, translator: Any, raised: Any) -> None:
    from torch._dynamo.exc import ObservedAttributeError, ObservedLookupError

    by_the_user = translator.current_instruction.opname in ("RAISE_VARARGS", "RERAISE")
    absent = isinstance(raised, (ObservedAttributeError, ObservedLookupError))
    variable = translator.f_code is type(os.environ).__getitem__.__code__  # recorded by name
    if absent and not by_the_user and not variable and raised not in handled:
        if (probe := _probe(raised)) is not None:
            inlined.rely(*probe)
        else:
            inlined.refuse("an exception for what is absent is handled")
    handled.add(raised)


def _note_result(
    function_of: str, inlined: Inlined, variable: Any, tx: Any, args: Any, kwargs: Any
) -> None:
    function = getattr(variable, function_of)
    folded = variable.can_constant_fold_through() and _reads_state(function)
    constants = _constants([*args, *kwargs.values()]) if folded else None
    if constants is not None:
        inlined.results.append(FoldedCall(function, constants, {}, _traced_line()))


def _note_fallback(inlined: Inlined, variable: Any, tx: Any, name: Any, *_: Any) -> None:
    """`__getattr__` is called, or what Dynamo does instead for that of `nn.Module`."""
    if variable.source is not None:
        inlined.facts.add(GuardFact(str(variable.source.name), FALLBACK, name))


def _note_super(inlined: Inlined, variable: Any, tx: Any, name: str) -> None:
    """`super()` passes classes that do not have an attribute."""
    source, cls = getattr(variable.objvar, "source", None), None
    if source is not None:
        cls, place = variable.objvar.python_type(), f"type({source.name})"
        if issubclass(cls, type):
            cls, place = variable.objvar.value, str(source.name)
    mro, derived = getattr(cls, "__mro__", ()), variable.typevar.as_python_constant()
    for index in range(mro.index(derived) + 1 if derived in mro else len(mro), len(mro)):
        if name in vars(mro[index]):
            return
        passed = f"{place}.__mro__[{index}]"
        inlined.facts.add(GuardFact(passed, "NOT_PRESENT_IN_GENERIC_DICT", name))


def _note_alias(inlined: Inlined, source: Any, first: Any) -> None:
    """Dynamo adds no guard if one is an argument and the other a global."""
    if first is not None and first != source:
        inlined.facts.add(GuardFact(str(source.name), "DUPLICATE_INPUT", str(first.name)))


def _note_cells(inlined: Inlined, variable: Any, parent: Any, *_: Any) -> None:
    source, effects = variable.get_source(), parent.output.side_effects
    for index, cell in enumerate(variable.fn.__closure__ or () if source is not None else ()):
        contents: Any = effects[cell].pre_existing_contents if cell in effects else None
        first = getattr(contents, "source", None)
        place = f"{source.name}.__closure__[{index}].cell_contents"
        if first is not None and place != str(first.name):
            inlined.facts.add(GuardFact(place, SHARED_CELL, str(first.name)))


def _note_module_access(
    access: str, inlined: Inlined, variable: Any, tx: Any, attribute: str
) -> None:
    """That a module has an attribute or not; what it has is guarded if it is read.

    Submodules are left out: they depend on what was imported.
    """
    module, name = variable.value, variable.value.__name__
    if module is not sys.modules.get(name):
        return
    is_read = access != "call_obj_hasattr" and hasattr(module, attribute)
    if not is_read and not isinstance(getattr(module, attribute, None), ModuleType):
        inlined.facts.add(GuardFact(f"__import__({name!r})", "HASATTR", attribute))


def _note_class_access(inlined: Inlined, variable: Any, tx: Any, attribute: str, *_: Any) -> None:
    if variable.source is None:
        inlined.class_reads.add((variable.value, attribute))
    elif _is_literal(inspect.getattr_static(variable.value, attribute, None)):
        inlined.rely(variable.source, "CONSTANT_MATCH", part=f".{attribute}")  # torch 2.11 has none


def _is_literal(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, bool | int | float | complex | str | bytes) for each in parts)


def _note_kept_result(inlined: Inlined, variable: Any, tx: Any, args: Any, kwargs: Any) -> None:
    """A function marked by `assume_constant_result`, which Dynamo calls."""
    if getattr(variable.fn, "_dynamo_marked_constant", False):
        positional = [*args, variable.obj] if hasattr(variable, "obj") else args
        constants, named = _constants(positional), _constants(kwargs.values())
        arguments = None if named is None else constants
        by_name = dict(zip(kwargs, named or (), strict=False))
        inlined.results.append(FoldedCall(variable.fn, arguments, by_name, _traced_line()))


def _note_part(inlined: Inlined, variable: Any, tx: Any, name: str) -> None:
    """An attribute of a function, or of its code, that Dynamo takes as constant."""
    is_part = name in _PARTS_OF_FUNCTIONS or type(getattr(variable, "value", None)) is CodeType
    if is_part and variable.source is not None:
        inlined.rely(variable.source, "CONSTANT_MATCH", part=f".{name}")


def _note_wrapped(inlined: Inlined, builder: Any, value: Any) -> None:
    expression = str(builder.source.name)
    if "SYNTHETIC_LOCAL" not in expression:  # a variable of Dynamo's
        inlined.wrapped.add(expression)


def _note_builtin(inlined: Inlined, variable: Any, tx: Any, args: Any, kwargs: Any) -> None:
    """What Dynamo decides by objects of this process, which an equal process may not share."""
    function = variable.fn
    if function is hash and tx.f_code.co_name != "__hash__" and not _are_numbers(args):
        inlined.refuse("the hash of an object")
    if function in (operator.is_, operator.is_not):
        _note_identity(inlined, tx, args)
    if function in (isinstance, issubclass) and len(args) == 2:
        _note_class_check(inlined, function.__name__, *args)
    if function is set and args:
        items = getattr(args[0].realize(), "items", None)
        if isinstance(items, list):
            inlined.ordered.append(tuple(item.realize() for item in items))


def _note_called(inlined: Inlined, variable: Any) -> None:
    """A function becomes an object where native code calls it, as the key of `max` or in `re.sub`:
    Dynamo traces nothing of it, and takes the result as constant."""
    code = variable.get_code()
    if not _is_for_native_code() or is_torch_file(code.co_filename):
        return
    if variable.source is not None:
        inlined.rely(variable.source, CALLED)
    else:
        _add_made(inlined, variable)


def _add_made(inlined: Inlined, variable: Any) -> None:
    """A function that the frame has made, and those that it holds."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    inlined.called.add(variable.get_code())
    for cell in getattr(getattr(variable, "closure", None), "items", ()):
        held: Any = InstructionTranslator.current_tx().output.side_effects.load_cell(cell)
        if type(held) is type(variable) and held.get_code() not in inlined.called:
            _add_made(inlined, held)


def _is_for_native_code() -> bool:
    """Whether Dynamo makes an object for a call, and not to ask what it could make."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name in _MAKES_OBJECTS:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in _CALLS_NATIVELY


def _note_class_check(inlined: Inlined, check: str, one: Any, checked: Any) -> None:
    """Registries of abstract classes and methods of metaclasses decide, without a guard."""
    constants = _constants([checked]) if one.source is not None else None
    classes = tuple(each for each in _classes(constants) if type(each) is not type)
    if classes:
        inlined.rely(one.source, CLASS_CHECK, (check, classes))


def _classes(checked: Any) -> Iterator[type]:
    """The classes of a tuple or a union."""
    if isinstance(checked, type):
        yield checked
    elif isinstance(checked, tuple):
        for each in checked:
            yield from _classes(each)
    else:
        yield from _classes(getattr(checked, "__args__", ()))
        yield from _classes(getattr(checked, "__origin__", ()))


def _note_identity(inlined: Inlined, tx: Any, args: Any) -> None:
    if is_torch_file(tx.f_code.co_filename):
        return  # torch writes `a is b or a == b` for what Python does
    values = _constants(args) or ()
    one, other = values if len(values) == 2 else (None, None)
    may_be_two = type(one) is type(other) and type(one) in _EQUAL_OBJECTS and one == other
    if may_be_two and not (type(one) is int and -5 <= one <= 256):
        inlined.refuse(f"whether {one!r} is one object or two")


def _note_keys(inlined: Inlined, names: Any) -> None:
    """The `__dict__` of an object is iterated."""
    if (source := getattr(names.item, "source", None)) is not None:
        inlined.rely(source, "DICT_KEYS_MATCH", part=".__dict__")


def _note_key(inlined: Inlined, names: Any, key: Any) -> None:
    source = getattr(names.item, "source", None)
    if source is not None and not hasattr(names.item, "get_code"):
        name = key if isinstance(key, str) else key.vt.as_python_constant()
        inlined.facts.add(GuardFact(str(source.name), "NOT_PRESENT_IN_GENERIC_DICT", name))


def _note_popped(inlined: Inlined, variable: Any, tx: Any, name: str, *_: Any) -> None:
    if name == "pop":
        _note_order(inlined, variable)


def _note_extended(inlined: Inlined, _: Any, tx: Any, name: str, args: Any, *__: Any) -> None:
    """Dynamo makes a list of a set or a dict."""
    added: Any = args[0].realize() if name == "extend" and args else None
    if "Set" in type(added).__name__:
        _note_order(inlined, added)
    elif "Dict" in type(added).__name__ and added.source is not None:
        inlined.rely(added.source, "ITERATED")


def _note_joined(inlined: Inlined, variable: Any, tx: Any, name: str, *_: Any) -> None:
    """`a | b` has the keys of `a`, which torch 2.11 does not guard."""
    if name == "__or__" and variable.source is not None and "Dict" in type(variable).__name__:
        inlined.rely(variable.source, "ITERATED")


def _note_order(inlined: Inlined, variable: Any, *_: Any) -> None:
    """A set is iterated, in an order that its history and the hashes of its items decide."""
    kind = type(variable).__name__
    if "set" not in kind.lower() or "Ordered" in kind or "DictKey" in kind:
        return
    if len(variable.items) < 2 or _is_orderless():
        return
    if variable.source is None and _is_of_list(inlined, [item.vt for item in variable.items]):
        return
    is_random = sys.flags.hash_randomization and not _are_numbers(i.vt for i in variable.items)
    if variable.source is None or is_random:
        inlined.refuse("the order of a set")
    else:
        inlined.rely(variable.source, "ITERATED")


def _is_of_list(inlined: Inlined, items: Sequence[Any]) -> bool:
    """Whether a set has items of one list, and in its order."""
    for ordered in inlined.ordered:
        following = iter(ordered)
        if all(any(item is other for other in following) for item in items):
            return True
    return False


def _are_numbers(variables: Any) -> bool:
    """Whether the hashes of constants are the same in every process."""
    values = _constants(variables)
    return values is not None and all(isinstance(value, int | float) for value in values)


def _is_orderless() -> bool:
    """Whether Dynamo iterates a set for a function whose result has no order."""
    frame, names = inspect.currentframe(), set()
    for _ in range(_NEAR):
        if (frame := frame.f_back if frame else None) is not None:
            names.add(frame.f_code.co_name)
    return not names.isdisjoint(_ORDERLESS)


_PARTS_OF_FUNCTIONS = ("__annotations__", "__doc__", "__module__", "__name__", "__qualname__")
_EQUAL_OBJECTS = (str, bytes, int, float, complex, tuple, frozenset)
"""Types of constants of which two objects may be equal."""
_PART_ACCESS = ("var_getattr", "tp_getattro_impl")
"""Methods by which Dynamo looks up an attribute of any value, by version of torch."""
_SET_ORDER = {"tp_iter_impl", "unpack_var_sequence"}
"""Methods by which Dynamo iterates a set, by version of torch."""
_ORDERLESS, _NEAR = ("call_sorted", "call_set", "call_frozenset"), 8
"""Functions of Dynamo that iterate a set whose order cannot be seen, and how far they are below."""


_MAKES_OBJECTS = {
    *("_is_for_native_code", "_note_called", "call", "guarded_method", "realize_and_forward"),
    *("as_python_constant", "get_function", "_get_function_impl"),
    *("<listcomp>", "<dictcomp>", "<genexpr>"),
}
_CALLS_NATIVELY = {"constant_fold_handler", "call_function", "call_method"}
"""Functions of Dynamo that make an object of a variable, and those that then call native code."""


def _traced_line() -> str | None:
    return user_line(TracingContext.extract_stack())


def _reads_variable() -> set[CodeType]:
    """The code that reads an environment variable."""
    environments = (os.environ, getattr(os, "environb", os.environ))
    return {environment.encodekey.__code__ for environment in environments}


def _probe(raised: BaseException) -> tuple[Any, str, Any] | None:
    """What was absent, from the frames of Dynamo that raised an exception: source, kind of guard,
    attribute or key."""
    for frame, _ in reversed(list(traceback.walk_tb(raised.__traceback__))):
        names: dict[str, Any] = frame.f_locals
        variable: Any = names.get("self")
        name = names.get("name")
        if hasattr(variable, "objvar") and isinstance(names.get("attr_name"), str):
            # torch 2.11: `super().__getattribute__` looks for it in the object
            variable, name = variable.objvar, names["attr_name"]
        source = getattr(variable, "source", None)
        if source is None:
            continue
        if isinstance(name, str) and "AttributeError" in type(raised).__name__:
            return source, "HASATTR", name
        key = _constants([names[n] for n in ("arg", "key") if n in names])
        if key and "KeyError" in type(raised).__name__:
            return source, "DICT_CONTAINS", key[0]
        if "IndexError" in type(raised).__name__:
            return source, "SEQUENCE_LENGTH", None
    return None


_STATELESS = {
    # decided by the arguments, and by the device, which is a factor of the key
    *("is_complex", "is_floating_point", "promote_types", "get_enum", "_assert", "intern"),
    *("get_device_properties", "_get_device_index"),
    # factors of the key
    *("is_autocast_enabled", "is_autocast_cpu_enabled", "_is_any_autocast_enabled"),
    *("get_autocast_dtype", "get_autocast_gpu_dtype", "get_default_dtype"),
}
"""Functions that Dynamo calls while tracing whose results need no condition."""


def _reads_state(function: Any) -> bool:
    """Whether a function that Dynamo calls while tracing depends on more than its arguments."""
    home = str(getattr(function, "__module__", None) or "torch").partition(".")[0]
    return home in ("torch", "sys") and function.__name__ not in _STATELESS


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
