"""What code names, reads and writes, by its bytecode.

Each function looks at a code object and at those inside it: of nested functions, lambdas and
comprehensions.
"""

from __future__ import annotations

import dis
import functools
import os
import re
import types
from collections.abc import Iterator

_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"}
_LOADS_PART = {"LOAD_ATTR", "LOAD_METHOD"}
_STORES = {
    dis.opmap[name]
    for name in ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR")
}
_EXTENDED = dis.opmap["EXTENDED_ARG"]
_IMPORT = dis.opmap["IMPORT_NAME"]
_READS_GLOBAL = {dis.opmap["LOAD_GLOBAL"]: 1, dis.opmap["LOAD_NAME"]: 0}
"""Opcodes, and how far the index of a name is shifted in their argument (Python 3.11 and later)."""
_MUTATORS = {
    *("append", "extend", "insert", "remove", "clear", "pop", "popitem", "update", "setdefault"),
    *("add", "discard", "appendleft", "popleft", "__setitem__", "__delitem__"),
}


def with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and all inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from with_nested(constant)


@functools.lru_cache(maxsize=1 << 14)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Every name that code uses as a global or an attribute."""
    return frozenset(name for part in with_nested(code) for name in part.co_names)


@functools.lru_cache(maxsize=1 << 14)
def global_names(code: types.CodeType) -> frozenset[str]:
    """The globals that code reads."""
    return frozenset(name for part in with_nested(code) for name in _globals_of(part))


def _globals_of(code: types.CodeType) -> Iterator[str]:
    extended = 0  # `dis` takes a hundred times as long
    for opcode, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument |= extended << 8
        extended = argument if opcode == _EXTENDED else 0
        if opcode in _READS_GLOBAL:
            yield code.co_names[argument >> _READS_GLOBAL[opcode]]


@functools.lru_cache(maxsize=1 << 14)
def probed_names(code: types.CodeType) -> frozenset[str]:
    """The names that code may give to `hasattr` or `getattr`."""
    return frozenset(
        constant
        for part in with_nested(code)
        if not {"hasattr", "getattr"}.isdisjoint(part.co_names)
        for constant in part.co_consts
        if isinstance(constant, str) and constant.isidentifier()
    )


@functools.lru_cache(maxsize=1 << 14)
def imports(code: types.CodeType) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """What code imports when it runs: module, level of a relative one, and names from it."""
    found = set[tuple[str, int, tuple[str, ...]]]()
    for part in with_nested(code):
        if _IMPORT in part.co_code[::2]:
            steps = list(dis.get_instructions(part))
            for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
                if step.opcode == _IMPORT:
                    found.add((step.argval, level.argval, names.argval or ()))
    return tuple(sorted(found))


def variables_read(code: types.CodeType, name: str) -> set[str] | None:
    """The environment variables that code reads by `name`, such as `environ`; None if one is not
    named by a constant."""
    read: set[str] = set()
    for part in with_nested(code):
        steps = [s for s in dis.get_instructions(part) if s.opname not in ("PUSH_NULL", "PRECALL")]
        for index, step in enumerate(steps):
            if step.argval == name and step.opname in _LOADS | _LOADS_PART:
                key = _key_of_read(steps, index)
                if key.opname != "LOAD_CONST" or not isinstance(key.argval, str | bytes):
                    return None
                read.add(os.fsdecode(key.argval))
    return read


def _key_of_read(steps: list[dis.Instruction], index: int) -> dis.Instruction:
    """The step that loads the key by which `name` or `module.name` at `index` is read."""
    if steps[index + 1].opname == "CONTAINS_OP":
        return steps[index - 1 - (steps[index].opname in _LOADS_PART)]
    return steps[index + 1 + (steps[index + 1].argval in ("get", "__getitem__"))]


def mutated_names(code: types.CodeType) -> frozenset[str]:
    """Globals and closure variables that code writes to or into."""
    return frozenset(re.split(r"[.\[]", part, maxsplit=1)[0] for part in written_parts(code))


@functools.lru_cache(maxsize=1 << 14)
def written_parts(code: types.CodeType) -> frozenset[str]:
    """What code writes to: counters, memos, registries. `name`, `name.attribute` or `name['key']`,
    of globals and closure variables.

    It varies while a program runs, so its content is no part of the code.
    """
    return frozenset(name for part in with_nested(code) for name in _written_by(part))


def _written_by(code: types.CodeType) -> Iterator[str]:
    if _STORES.isdisjoint(code.co_code[::2]) and _MUTATORS.isdisjoint(code.co_names):
        return  # disassembling takes a hundred times as long
    steps = list(dis.get_instructions(code))
    for index, step in enumerate(steps):
        if step.opname in ("STORE_GLOBAL", "STORE_DEREF") and step.argval not in code.co_cellvars:
            yield str(step.argval)
        elif step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            yield from _item_of(steps, index)
        elif step.opname == "STORE_ATTR":
            yield from _attribute_of(steps, index)
        elif step.opname in _LOADS and index + 1 < len(steps):
            method = steps[index + 1]
            if method.opname in _LOADS_PART and method.argval in _MUTATORS:
                yield str(step.argval)


def _attribute_of(steps: list[dis.Instruction], store: int) -> Iterator[str]:
    """`name.attribute`, if the object is a plain name."""
    name = steps[store].argval
    for owner, copy, load in zip(steps[:store], steps[1:store], steps[2:store], strict=False):
        is_read = copy.opname == "COPY" and load.opname == "LOAD_ATTR" and load.argval == name
        if is_read and owner.opname in _LOADS:  # object.attribute += value
            yield f"{owner.argval}.{name}"
            return
    if steps[store - 1].opname in _LOADS:
        yield f"{steps[store - 1].argval}.{name}"


def _item_of(steps: list[dis.Instruction], store: int) -> Iterator[str]:
    """`name['key']`, if the container is a plain name; `name` if the key is no constant."""
    depth = 0
    for index in range(store - 1, 0, -1):
        if steps[index].opname == "COPY" and steps[index - 1].opname == "COPY":
            if index >= 3:  # container[key] += value
                yield from _item(steps[index - 3], steps[index - 2 : index - 1])
            return
        depth += dis.stack_effect(steps[index].opcode, steps[index].arg, jump=False)
        if depth == 1:
            yield from _item(steps[index - 1], steps[index:store])
            return


def _item(container: dis.Instruction, key: list[dis.Instruction]) -> Iterator[str]:
    if container.opname in _LOADS:
        is_constant = len(key) == 1 and key[0].opname == "LOAD_CONST"
        yield f"{container.argval}[{key[0].argval!r}]" if is_constant else str(container.argval)
