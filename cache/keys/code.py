"""Code that runs, as text by part: what a function does, calls, closes over and reads.

`code_parts` follows closures, defaults, the globals that a function names, methods and base classes
of a value, in addition to what `stable_text` says of it. An installed package is a part by its
version; the interpreter and torch are versions in every key, and their code is not followed.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.metadata
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from . import environment
from .encoder import (
    DATA,
    KNOWN,
    MAX_DEPTH,
    Encoder,
    Undescribable,
    class_name,
    decomposed,
    function_text,
    is_tensor,
    package_named,
    package_of,
    tensor_text,
    unwrapped,
)

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TRITON_FIELDS = ("fn", "configs", "keys", "values", "noinline", "do_not_specialize")
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"}
_LOADS_PART = {"LOAD_ATTR", "LOAD_METHOD"}
_STORES = {
    dis.opmap[name]
    for name in ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR")
}
_EXTENDED = dis.opmap["EXTENDED_ARG"]
_READS_GLOBAL = {dis.opmap["LOAD_GLOBAL"]: 1, dis.opmap["LOAD_NAME"]: 0}
"""Opcodes, and how far the index of a name is shifted in their argument (Python 3.11 and later)."""
_MUTATORS = {
    *("append", "extend", "insert", "remove", "clear", "pop", "popitem", "update", "setdefault"),
    *("add", "discard", "appendleft", "popleft", "__setitem__", "__delitem__"),
}


def code_parts(value: Any, name: str = "") -> dict[str, str]:
    """What `value` consists of, by path from `name`; raises Undescribable."""
    follower = _Follower()
    follower.follow(value, name)
    return follower.parts


def fingerprint(value: Any) -> str:
    """sha256 in hex of `code_parts`."""
    digest = hashlib.sha256()
    for path, text in code_parts(value).items():
        digest.update(f"{path}\0{text}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


class _Follower(Encoder):
    """Parts of code, by path. Each object is followed once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, str] = {}
        self._seen: dict[int, tuple[str, Any]] = {}  # kept alive so that ids are not reused
        self._written: set[str] = set()
        """Paths of what the code itself writes to."""

    def follow(self, value: Any, path: str) -> None:
        if path in self._written:
            return
        if type(value) in DATA:
            self.parts[path] = repr(value)
        elif id(value) in self._seen:
            self.parts[path] = f"<as {self._seen[id(value)][0]}>"
        elif path.count(".") + path.count("[") > MAX_DEPTH:
            raise Undescribable(path, "is nested too deeply")
        else:
            self._seen[id(value)] = (path, value)
            for name, inner in self._inside(value, path):
                self.follow(inner, path + name)

    def _inside(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, types.FunctionType):
            yield from self._function(value, path)
        elif isinstance(value, type):
            yield from self._class(value, path)
        elif is_tensor(value):
            self.parts[path] = f"{tensor_text(value)} {tensor_digest(value)[:16]}"
        elif type(value) is object:
            self.parts[path] = "<a sentinel>"
        elif (plain := self.plain(value, path)) is not None:
            self.parts[path] = plain
        elif isinstance(value, set | frozenset):
            self.parts[path] = self.text(value, path)
        elif package_of(type(value)) == "triton":
            self.parts[path] = class_name(type(value))
            fields = vars(value)
            yield from ((f".{name}", fields[name]) for name in _TRITON_FIELDS if name in fields)
        else:
            label, fields = decomposed(value, path)
            self.parts[path] = label
            if not isinstance(value, list | tuple | dict | types.MethodType | functools.partial):
                yield ".__class__", type(value)
            yield from fields

    def _function(self, function: types.FunctionType, path: str) -> Iterator[tuple[str, Any]]:
        self.parts[path] = function_text(function) + _version(_home(function))
        if _version(_home(function)) and "<locals>" not in function.__qualname__:
            return
        code = function.__code__
        self._written |= {f"{path}.{written}" for written in written_parts(code)}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                inner = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            yield f".{name}", inner
        if function.__defaults__:
            yield ".__defaults__", function.__defaults__
        if function.__kwdefaults__:
            yield ".__kwdefaults__", function.__kwdefaults__
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            yield ".__wrapped__", wrapped
        if not _version(_home(function)):
            for name in sorted(global_names(code)):
                if name in function.__globals__:
                    yield from self._global(f".{name}", function, name)

    def _global(
        self, path: str, function: types.FunctionType, name: str
    ) -> Iterator[tuple[str, Any]]:
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            inner = vars(value)
            for each in sorted(attribute_names(function.__code__) & inner.keys()):
                yield from _read(f"{path}.{each}", function.__code__, each, inner[each])
        elif isinstance(value, str) and (
            folder := os.path.dirname(str(function.__globals__.get("__file__") or ""))
        ):
            yield path, value.replace(folder, "<directory>")  # a moved checkout is the same code
        else:
            yield from _read(path, function.__code__, name, value)

    def _class(self, cls: type, path: str) -> Iterator[tuple[str, Any]]:
        version = _version(cls.__module__)
        self.parts[path] = class_name(cls) + version
        if not version:
            yield from ((f".__bases__[{i}]", base) for i, base in enumerate(cls.__bases__))
            yield from (
                (f".{name}", vars(cls)[name]) for name in sorted(vars(cls)) if _is_own(cls, name)
            )


def _read(path: str, code: types.CodeType, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What code reads of a value; of the environment the variables, all if one is computed."""
    if not any(value is each for each in environment.READERS):
        yield path, value
    elif (read := variables_read(code, name)) is None:
        yield path, dict(environment.VARIABLES)
    else:
        yield from ((f"{path}[{each!r}]", environment.observed(each)) for each in sorted(read))


def _home(function: types.FunctionType) -> str:
    """The module a function was written in; its `__module__` may be that of one it wraps."""
    return str(function.__globals__.get("__name__") or function.__module__)


def _is_own(cls: type, name: str) -> bool:
    """Whether an attribute was written in the body of the class."""
    if name.startswith("_abc_"):
        return False
    return isinstance(unwrapped(vars(cls)[name]), types.FunctionType) or not name.startswith("__")


@functools.cache
def _version(module: str | None) -> str:
    """ " (package version)" for code whose package is known by its version; else empty."""
    package = package_named(module)
    if package in KNOWN:
        return f" ({package})"
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    if not any(folder in file for folder in _INSTALLED):
        return ""
    try:
        return f" ({package} {importlib.metadata.version(package)})"
    except importlib.metadata.PackageNotFoundError:
        stated = getattr(sys.modules[package], "__version__", None)
        return f" ({package} {stated})" if isinstance(stated, str) else ""


def tensor_digest(value: Any) -> str:
    """sha256 in hex of a tensor's content."""
    data = value.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(data.view(sys.modules["torch"].uint8).numpy().tobytes()).hexdigest()


def nested_codes(code: types.CodeType) -> list[types.CodeType]:
    """The code objects directly inside another: of nested functions, lambdas, comprehensions."""
    return [const for const in code.co_consts if isinstance(const, types.CodeType)]


def attribute_names(code: types.CodeType) -> set[str]:
    """Every name that a code object or one inside it uses as a global or an attribute."""
    return set(code.co_names).union(*map(attribute_names, nested_codes(code)))


@functools.lru_cache(maxsize=1 << 14)
def global_names(code: types.CodeType) -> frozenset[str]:
    """The globals that a code object or one inside it reads."""
    read, extended = set(), 0
    for opcode, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument |= extended << 8
        extended = argument if opcode == _EXTENDED else 0
        if opcode in _READS_GLOBAL:
            read.add(code.co_names[argument >> _READS_GLOBAL[opcode]])
    return frozenset(read).union(*map(global_names, nested_codes(code)))


def probed_names(code: types.CodeType) -> set[str]:
    """The names that a code object or one inside it may give to `hasattr` or `getattr`."""
    inner: set[str] = set().union(*map(probed_names, nested_codes(code)))
    if not {"hasattr", "getattr"} & {*code.co_names}:
        return inner
    return inner.union(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())


def variables_read(code: types.CodeType, name: str) -> set[str] | None:
    """The environment variables that code reads by `name`, such as `environ`; None if one is not
    named by a constant."""
    read: set[str] = set()
    for inner in (variables_read(each, name) for each in nested_codes(code)):
        if inner is None:
            return None
        read |= inner
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("PUSH_NULL", "PRECALL")]
    for index, step in enumerate(steps):
        if step.argval == name and (step.opname in _LOADS or step.opname in _LOADS_PART):
            after = index + 1 + (steps[index + 1].argval in ("get", "__getitem__"))
            is_asked = steps[index + 1].opname == "CONTAINS_OP"
            key = steps[_before(steps, index) if is_asked else after]
            if key.opname != "LOAD_CONST" or not isinstance(key.argval, str | bytes):
                return None
            read.add(os.fsdecode(key.argval))
    return read


def _before(steps: list[dis.Instruction], index: int) -> int:
    """The step before the expression `name` or `module.name` that ends at `index`."""
    return index - 1 - (steps[index].opname in _LOADS_PART)


def mutated_names(code: types.CodeType) -> frozenset[str]:
    """Globals and closure variables that the code itself writes to or into."""
    return frozenset(re.split(r"[.\[]", part, maxsplit=1)[0] for part in written_parts(code))


@functools.lru_cache(maxsize=1 << 14)
def written_parts(code: types.CodeType) -> frozenset[str]:
    """What the code itself writes to: counters, memos, registries. `name`, `name.attribute` or
    `name['key']`, of globals and closure variables.

    It varies while a program runs, so its content is no part of the code.
    """
    inner: frozenset[str] = frozenset().union(*map(written_parts, nested_codes(code)))
    if _STORES.isdisjoint(code.co_code[::2]) and _MUTATORS.isdisjoint(code.co_names):
        return inner  # disassembling takes a hundred times as long
    steps = list(dis.get_instructions(code))
    names = set()
    for index, step in enumerate(steps):
        if step.opname in ("STORE_GLOBAL", "STORE_DEREF") and step.argval not in code.co_cellvars:
            names.add(str(step.argval))
        elif step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            names |= _item_of(steps, index)
        elif step.opname == "STORE_ATTR":
            names |= _attribute_of(steps, index)
        elif step.opname in _LOADS and index + 1 < len(steps):
            then = steps[index + 1]
            if then.opname in _LOADS_PART and then.argval in _MUTATORS:
                names.add(str(step.argval))
    return inner | names


def _attribute_of(steps: list[dis.Instruction], store: int) -> set[str]:
    """`name.attribute`, if the object is a plain name."""
    name = steps[store].argval
    for before, copy, load in zip(steps[:store], steps[1:store], steps[2:store], strict=False):
        is_read = copy.opname == "COPY" and load.opname == "LOAD_ATTR" and load.argval == name
        if is_read and before.opname in _LOADS:  # object.attribute += value
            return {f"{before.argval}.{name}"}
    before = steps[store - 1]
    return {f"{before.argval}.{name}"} if before.opname in _LOADS else set()


def _item_of(steps: list[dis.Instruction], store: int) -> set[str]:
    """`name['key']`, if the container is a plain name; `name` if the key is no constant."""
    depth = 0
    for index in range(store - 1, 0, -1):
        step = steps[index]
        if step.opname == "COPY" and steps[index - 1].opname == "COPY":  # container[key] += value
            return _item(steps[index - 3], [steps[index - 2]]) if index >= 3 else set()
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth == 1:
            return _item(steps[index - 1], steps[index:store])
    return set()


def _item(container: dis.Instruction, key: list[dis.Instruction]) -> set[str]:
    if container.opname not in _LOADS:
        return set()
    is_constant = len(key) == 1 and key[0].opname == "LOAD_CONST"
    return {f"{container.argval}[{key[0].argval!r}]" if is_constant else str(container.argval)}
