"""The conditions of a trace, from what Dynamo guarded, inlined and read.

Each value that Dynamo relied on becomes a place and what was observed there. A value without a
place or without a stable description makes the trace not cacheable.

Guards on arguments are left out: a step checks its tensors, and other arguments are in the key.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, EnumMeta
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...errors import NotPortable
from ...torch_compat.basics.facts import CLASS_CHECK, SHARED_CELL, UNGUARDED, GuardFact
from ...torch_compat.basics.frames import is_torch_file
from ...torch_compat.basics.modules import CALL_METHODS, called_function
from ...torch_compat.basics.ops import op_name, triton_call
from ...torch_compat.basics.settings import is_settings
from ...torch_compat.tracing.dynamo import COMPILED_FUNCTION, Captured
from ..ir.locations import node_location
from ..ir.ops import is_custom
from ..ir.serialization import encode
from .bytecode import attribute_names, global_names, probed_names, with_nested
from .conditions import Conditions, ConditionTree
from .kinds import CALLED_OP, FUNCTION, IDENTITY, INLINED_OP, TYPE, VALUE, kind_of_guard
from .locator import VARIABLES_AT, Located, Locator, Unlocatable, module_place
from .places import GLOBAL_HOOKS, HOOK_TABLES, MODEL, OPS, Step, called_as, encoded_key, reader
from .torch_functions import OF_TORCH, TENSOR, all_nodes, names_read
from .values import (
    VERSIONED,
    Undescribable,
    class_name,
    is_standard_file,
    package_of,
    plain_text,
    unwrapped,
)

_OF_ATTRIBUTE = ("hasattr", "in __dict__", "has its own")
"""Kinds of conditions whose argument is the name of an attribute."""
_CALLED_METHODS = ("__class_getitem__", "_missing_")
_METACLASS_METHODS = ("__call__", "__getitem__", "__iter__", "__len__", "__contains__")
"""Methods that Dynamo calls while tracing, or may call, to get a constant."""

_WITHOUT_IDENTITY = (bool, int, float, complex, str, bytes, tuple, Enum, type, types.NoneType)


def record_conditions(
    model: torch.nn.Module, captured: Captured, locator: Locator, splits: Callable[[Node], bool]
) -> Conditions:
    """All conditions of a trace; `splits` says at which nodes of its graph the graph is split."""
    trace = _TraceConditions(model, captured, locator)
    trace.add_hooks()
    trace.add_guards()
    trace.add_code()
    trace.add_class_reads()
    trace.add_variables()
    trace.add_results()
    trace.obstacles += add_called_code(trace.tree, captured.graph, model, splits)
    return Conditions(trace.tree.data(), tuple(dict.fromkeys(trace.obstacles)))


@dataclass
class _TraceConditions:
    model: torch.nn.Module
    captured: Captured
    locator: Locator
    obstacles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = ConditionTree(self.model)
        self._weights = {id(t) for t in (*self.model.parameters(), *self.model.buffers())}
        self._classes: dict[type, Located] = {}

    def add_hooks(self) -> None:
        """Conditions on how many hooks a call of the model runs: Dynamo guards those that exist."""
        self.tree.add(MODEL, [], "hooks")
        for name in GLOBAL_HOOKS:
            self.tree.add(torch.nn.Module.__module__, [name], "length")

    def add_guards(self) -> None:
        self._add_class(Located(self.model, MODEL))
        for guard in self.captured.guards:
            if guard.expression and not guard.expression.startswith("___get_torch_function_mode"):
                try:
                    self._add_guard(guard)
                except (Unlocatable, Undescribable) as error:
                    where = f" ({guard.where})" if guard.where else ""
                    self.obstacles.append(f"{error}{where}")
        for alias, canonical in self.locator.aliases.values():
            roots = alias.root, canonical.root
            if all(root is not None and not root.startswith(OF_TORCH) for root in roots):
                self.tree.same((str(roots[0]), alias.steps), (str(roots[1]), canonical.steps))

    def _add_guard(self, guard: GuardFact) -> None:
        if guard.expression.endswith("()"):
            called = self.locator.locate(guard.expression.removesuffix("()")).value
            if any(called is call.function for call in self.captured.inlined.results):
                return
        located = self.locator.locate(guard.expression)
        root, steps, value = located.root, located.steps, located.value
        if root is None or (root.startswith(OF_TORCH) and not is_settings(sys.modules[root])):
            return
        if steps and _without_users_hooks(root, str(steps[0])):
            return
        if guard.kind in ("DUPLICATE_INPUT", SHARED_CELL):
            other = self.locator.locate(guard.argument)
            if other.root is not None and not other.root.startswith(OF_TORCH):
                self.tree.same((root, steps), (other.root, other.steps))
            return
        kind, step = kind_of_guard(guard.kind), steps[-1] if steps else ""
        of_key = isinstance(step, list) and step[0] == "held" and isinstance(value, str | int)
        if of_key and "___set_getitem" not in guard.expression:
            return  # Dynamo guards all keys of a subclass of dict; what was read has other guards
        if (root, steps[:2]) == ("os", VARIABLES_AT) and len(steps) > 2:
            return  # an environment variable is recorded by name
        if (root, steps) == ("os", VARIABLES_AT) and kind in ("keys", "length"):
            raise Undescribable("os.environ", "is read as a whole")
        of_attribute = kind in _OF_ATTRIBUTE
        if id(value) in self._weights and not of_attribute:
            return  # the form of each weight is in the key
        if guard.kind == "EMPTY_NN_MODULE_HOOKS_DICT":
            self.tree.add(root, steps[:-1], "hooks")
        elif str(step).startswith(HOOK_TABLES):
            self.tree.add(root, steps, "length")
        else:
            self._add_class(located)
            if guard.kind == CLASS_CHECK:
                self._add_class_check(located, *guard.argument)
            else:
                self._add_value(guard, kind, located)

    def _add_value(self, guard: GuardFact, kind: str, located: Located) -> None:
        """What a guard says of a value, and what Dynamo relies on without a guard."""
        value, argument = located.value, None
        if guard.kind == UNGUARDED and plain_text(value) is None:
            kind = TYPE  # what was read of it has guards
        if kind in _OF_ATTRIBUTE:
            argument = guard.argument
        elif kind == "contains":
            try:
                argument = encoded_key(guard.argument)
            except TypeError:
                kind = "keys"
        elif kind == "length" and isinstance(value, Mapping | Set):  # what is read has guards
            kind = "truth" if isinstance(value, Mapping) else VALUE
        self._add(located, kind, argument)
        if isinstance(value, EnumMeta) and package_of(value) not in VERSIONED:
            self._add(located, "members")
        is_inner = isinstance(value, types.FunctionType) and "<" in value.__code__.co_qualname
        has_identity = kind in (TYPE, "length", "keys") or is_inner
        if has_identity and not isinstance(value, _WITHOUT_IDENTITY):
            self._add(located, IDENTITY)

    def _add(self, located: Located, kind: str, argument: Any = None) -> None:
        assert located.root is not None
        self.tree.add(located.root, located.steps, kind, argument)

    def _add_class_check(self, located: Located, check: str, classes: Sequence[type]) -> None:
        """What `isinstance` or `issubclass` says of a value, which a start asks again."""
        cls = located.value if isinstance(located.value, type) else type(located.value)
        for checked in classes:
            if not {package_of(cls), package_of(checked)} <= VERSIONED:
                try:
                    self._add(located, check, encoded_key(checked))
                except TypeError as error:
                    raise Undescribable(class_name(checked), "cannot be located") from error

    def _add_class(self, located: Located) -> None:
        """Remember a place of the class of a value, or of a value that is a class."""
        if not isinstance(located.value, type):
            located = located.then(type(located.value), ["type", None])
        self._classes.setdefault(located.value, located)

    def add_code(self) -> None:
        """Conditions on the code of each function that was inlined, as loaded in this process."""
        for name in sorted({"forward", called_as(self.model)}):
            self.tree.add(MODEL, [name], "code")
        forward = called_function(self.model)
        if isinstance(forward, types.FunctionType):
            method = ["__func__"] if hasattr(self.model.forward, "__func__") else []
            for name in ("__defaults__", "__kwdefaults__"):
                self._try(MODEL, ["forward", *method, name], "value")
        functions = self.captured.inlined.functions
        inlined = {code: function for code, function in functions.items() if _is_users(code)}
        wanted = {*functions, getattr(forward, "__code__", None)}
        covered = {code for cls in self._all_classes() for code in self._add_methods(cls, wanted)}
        by_guard = set(self._code_of_guards())
        for code, function in inlined.items():
            if code not in covered and code not in by_guard:
                self._add_function(code, function)
        for code in sorted(self.captured.inlined.called, key=lambda code: code.co_qualname):
            self._add_function(code, None, "calls inside")
        named = [f for f in (forward, *inlined.values()) if isinstance(f, types.FunctionType)]
        self._add_names(named)
        self._add_probed_names(named)

    def _add_names(self, functions: Iterable[types.FunctionType]) -> None:
        """Conditions on what Dynamo takes as constant: builtins, operators, methods of tensors."""
        of_graph = names_read(all_nodes(self.captured.graph))
        attributes = set(of_graph.pop(TENSOR))
        for space, read in of_graph.items():
            self._try(space, [], "added", read)
        facts = self.captured.inlined.facts
        probed = {str(each.argument) for each in facts if each.kind == "HASATTR"}
        builtin_names: dict[str, set[str]] = {}
        for function in functions:
            attributes |= attribute_names(function.__code__)
            probed |= probed_names(function.__code__)
            module = sys.modules.get(function.__module__)
            if module is not None and vars(module) is function.__globals__:
                names = builtin_names.setdefault(function.__module__, set())
                names |= global_names(function.__code__) - vars(module).keys()
        builtin_names["builtins"] = set().union(*builtin_names.values())
        for module_name, names in sorted(builtin_names.items()):
            self._try(module_name, [], "added", sorted(names))
        of_torch: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, torch.nn.Module)
        for cls in of_torch:
            used = sorted((attributes & {*dir(cls)}) | probed)
            if cls is torch.nn.Module:
                used += CALL_METHODS
            self._try("torch" if cls is torch.Tensor else "torch.nn", [cls.__name__], "added", used)
        for cls in self._all_classes():
            if (place := self._place_of_class(cls)) is None:
                continue
            root, steps = place
            self._add_calls(cls, root, steps)
            if issubclass(cls, torch.nn.Module):
                self._try(root, [*steps, ["static", "__call__"]], "code")
            if package_of(type(cls)) not in VERSIONED:
                used = sorted(attributes & {*dir(type(cls))})
                self._try(root, [*steps, ["type", None]], "added", used)

    def add_class_reads(self) -> None:
        """Conditions on attributes of classes that Dynamo reads without a guard."""
        reads = self.captured.inlined.class_reads
        for cls, name in sorted(reads, key=lambda read: (class_name(read[0]), read[1])):
            held = unwrapped(inspect.getattr_static(cls, name, None))
            if package_of(cls) in VERSIONED or isinstance(held, types.FunctionType):
                continue  # what was inlined has a condition on its code
            if place := self._place_of_class(cls):
                self._try(*place, "attribute", name)
            else:
                self.obstacles.append(f"{class_name(cls)}.{name} cannot be located")

    def _add_probed_names(self, functions: Sequence[types.FunctionType]) -> None:
        """Conditions on which names functions have, for `hasattr` and `getattr`."""
        probed = sorted(set().union(*(probed_names(each.__code__) for each in functions)))
        if not probed:
            return
        for located in list(self.locator.located.values()):
            if located.root is not None and isinstance(located.value, types.FunctionType):
                self._try(located.root, located.steps, "names", probed)

    def _add_calls(self, cls: type, root: str, steps: Sequence[Step]) -> None:
        """Conditions on methods of a class that Dynamo calls instead of tracing them."""
        of_metaclass: tuple[Step, ...] = (*steps, ["type", None])
        owners = ((cls, steps, _CALLED_METHODS), (type(cls), of_metaclass, _METACLASS_METHODS))
        for owner, place, names in owners:
            for name in () if package_of(owner) in VERSIONED else names:
                function = unwrapped(inspect.getattr_static(owner, name, None))
                code = getattr(function, "__code__", None)
                if code and _is_users(code):
                    self._try(root, [*place, ["static", name]], "calls")
                    self._try(root, steps, "calls")  # its argument is the class

    def _all_classes(self) -> dict[type, Located]:
        """Classes that guards are on and those of submodules, with their places."""
        for name, module in self.model.named_modules():
            steps: list[Step] = []
            for part in name.split(".") if name else ():
                steps += ["_modules", ["item", part]]
            self._add_class(Located(module, MODEL, tuple(steps)))
        return self._classes

    def _add_methods(self, cls: type, wanted: set[Any]) -> Iterator[types.CodeType]:
        """Conditions on the methods of a class that were inlined: which function each name is."""
        if (place := self._place_of_class(cls)) is None:
            return
        root, steps = place
        for name in sorted({name for base in cls.__mro__ for name in vars(base)}):
            method = unwrapped(inspect.getattr_static(cls, name, None))
            for function, inside in _with_wrapped(method):
                if function.__code__ in wanted:
                    self._try(root, [*steps, ["static", name], *inside], "code")
                    yield function.__code__

    def _place_of_class(self, cls: type) -> tuple[str, Sequence[Step]] | None:
        """By module and name where that leads to the class, else from the model or the globals."""
        located = module_place(cls.__module__, cls.__qualname__)
        if located is None or located.value is not cls:
            located = self._classes.get(cls)
        return None if located is None or located.root is None else (located.root, located.steps)

    def _code_of_guards(self) -> Iterator[types.CodeType]:
        """The code that guards are on."""
        for located in self.locator.located.values():
            function = unwrapped(located.value) if located.root is not None else None
            if isinstance(function, types.FunctionType):
                yield from with_nested(function.__code__)

    def _add_function(
        self, code: types.CodeType, function: types.FunctionType | None, kind: str = "code"
    ) -> None:
        modules = [function.__module__] if function else []
        modules += [
            name
            for name, module in list(sys.modules.items())
            if getattr(module, "__file__", None) == code.co_filename
        ]
        name = function.__qualname__ if function else code.co_qualname
        outer_names = [each.partition(".<locals>")[0] for each in (name, code.co_qualname)]
        for module, path in itertools.product(modules, (name, *outer_names)):
            located = module_place(module, path)
            for candidate, inside in _with_wrapped(unwrapped(located.value)) if located else ():
                if located and code in (within := [*with_nested(candidate.__code__)]):
                    index = None if kind == "code" else within.index(code)
                    self._try(module, [*located.steps, *inside], kind, index)
                    return
        where = f"{code.co_filename}:{code.co_firstlineno}"
        self.obstacles.append(f"the code of {code.co_qualname} cannot be located ({where})")

    def _try(self, root: str, steps: Sequence[Step], kind: str, argument: Any = None) -> None:
        """A condition, or an obstacle."""
        try:
            self.tree.add(root, steps, kind, argument)
        except Undescribable as error:
            self.obstacles.append(str(error))

    def add_variables(self) -> None:
        for name in sorted(self.captured.inlined.variables):
            self.tree.variable(name)
        for what, where in sorted(self.captured.inlined.obstacles, key=str):
            self.obstacles.append(f"{what} ({where})")

    def add_results(self) -> None:
        """Conditions on what functions returned that Dynamo called while tracing.

        An object among the arguments, such as a process group, has a condition of its own.
        """
        objects = {id(each.value): each for each in self.locator.located.values()}
        for call in self.captured.inlined.results:
            arguments, named = call.arguments, call.named
            passed = [*(arguments or ()), *named.values()]
            others = [value for value in passed if not _is_portable(value)]
            if others and all(id(value) in objects for value in others):
                continue
            located = _place_of_function(call.function) or objects.get(id(call.function))
            if arguments is None or others or located is None or located.root is None:
                name = call.function.__qualname__
                self.obstacles.append(f"the result of {name} cannot be described ({call.where})")
            else:
                given = [encode([*arguments]), {name: encode(named[name]) for name in named}]
                self._try(located.root, located.steps, "result", given)


def _is_portable(value: Any) -> bool:
    """Whether a start of another process can pass `value` again."""
    try:
        encode(value)
    except NotPortable:
        return False
    return True


def _place_of_function(function: Any) -> Located | None:
    for module in (function.__module__, "torch", "torch._C"):
        located = module_place(str(module), function.__name__)
        if located is not None and located.value is function:
            return located
    return None


def _without_users_hooks(root: str, table: str) -> bool:
    """Whether a place is a table of hooks that tell of registrations, with no hook but ours, which
    return at once in a trace. Which of these there are depends on other models of the process."""
    if root != torch.nn.Module.__module__ or not table.endswith("_registration_hooks"):
        return False
    hooks = getattr(sys.modules[root], table).values()
    return all(hook.__module__.startswith(_PACKAGE) for hook in hooks)


_PACKAGE = f"{__name__.partition('.')[0]}."


def _is_users(code: types.CodeType) -> bool:
    return not is_torch_file(code.co_filename) and not is_standard_file(code.co_filename)


def _with_wrapped(function: Any) -> Iterator[tuple[types.FunctionType, tuple[Step, ...]]]:
    """`function`, and the functions that it decorates, each with its place inside it.

    A decorator keeps what it decorates in a variable of its own, and `torch.compile` in an
    attribute.
    """
    waiting: list[tuple[Any, tuple[Step, ...]]] = [(function, ())]
    seen = set[int]()
    while waiting:
        function, place = waiting.pop()
        if id(function) in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(id(function))
        yield function, place
        waiting.append((getattr(function, COMPILED_FUNCTION, None), (*place, COMPILED_FUNCTION)))
        for index, cell in enumerate(function.__closure__ or ()):
            with suppress(ValueError):  # not filled
                step: Step = ["item", index]
                inside = (*place, "__closure__", step, "cell_contents")
                waiting.append((cell.cell_contents, inside))


def add_called_code(
    tree: ConditionTree, graph: GraphModule, model: torch.nn.Module, splits: Callable[[Node], bool]
) -> Iterator[str]:
    """Add a condition for each custom op, Triton kernel and Python function that a traced graph
    calls; yields what cannot be described.

    Of a splitting op, which is called and not compiled, only the schema and the fake implementation
    count.
    """
    for node in all_nodes(graph):
        try:
            if is_custom(node.target):
                steps = op_name(node.target).split("::")
                tree.add(OPS, steps, CALLED_OP if splits(node) else INLINED_OP)
            elif (function := _function(node)) is not None:
                innermost = _innermost(function)
                root, name = str(innermost.__module__), innermost.__qualname__
                if reader(root, name.split("."), model)() is not function:
                    raise Undescribable(f"function {root}:{name}", "cannot be located by its name")
                tree.add(root, name.split("."), FUNCTION)
        except Undescribable as error:
            yield f"{error} ({node_location(node)})"


def _function(node: Node) -> Any:
    """The Triton kernel or the user's function that a node calls; None if it calls neither."""
    if launch := triton_call(node):
        return launch[0]
    target: Any = node.target
    home = getattr(target, "__globals__", {}).get("__name__") or getattr(target, "__module__", "")
    ignored = not hasattr(target, "__code__") or str(home).partition(".")[0] in VERSIONED
    return None if ignored else target


def _innermost(kernel: Any) -> Any:
    """The function of a Triton kernel: an autotuner holds a kernel, which holds a function."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel
