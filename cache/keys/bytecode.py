"""What a code object does and names, read from its bytecode."""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from typing import Any

_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"}
_MUTATORS = {
    *("append", "extend", "insert", "remove", "clear", "pop", "popitem", "update", "setdefault"),
    *("add", "discard", "appendleft", "popleft", "__setitem__", "__delitem__"),
}


@functools.lru_cache(maxsize=1 << 16)
def code_digest(code: types.CodeType) -> str:
    """sha256 in hex of what a code object does: no file name, no line numbers.

    Two codes that differ only in their lines are equal to Python as well, and share the digest.
    """
    counts = (code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    constants = [_constant(const) for const in code.co_consts]
    digest = hashlib.sha256(repr((counts, names, constants)).encode(errors="surrogatepass"))
    digest.update(len(code.co_code).to_bytes(8, "big") + code.co_code + code.co_exceptiontable)
    return digest.hexdigest()


def nested_codes(code: types.CodeType) -> list[types.CodeType]:
    """The code objects directly inside another: of nested functions, lambdas, comprehensions."""
    return [const for const in code.co_consts if isinstance(const, types.CodeType)]


def attribute_names(code: types.CodeType) -> set[str]:
    """Every name that a code object or one inside it uses as a global or an attribute."""
    return set(code.co_names).union(*map(attribute_names, nested_codes(code)))


@functools.lru_cache(maxsize=1 << 14)
def global_names(code: types.CodeType) -> frozenset[str]:
    """The globals that a code object or one inside it reads."""
    steps = dis.get_instructions(code)
    read = frozenset(str(s.argval) for s in steps if s.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return read.union(*map(global_names, nested_codes(code)))


@functools.lru_cache(maxsize=1 << 14)
def mutated_names(code: types.CodeType) -> frozenset[str]:
    """Globals and closure variables that the code itself writes to: counters, memos, registries.

    They vary while a program runs, so their content is no part of the code.
    """
    steps = list(dis.get_instructions(code))
    found = set()
    for index, step in enumerate(steps):
        if step.opname in ("STORE_GLOBAL", "STORE_DEREF") and step.argval not in code.co_cellvars:
            found.add(str(step.argval))
        elif step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            found |= _container_of(steps, index)
        elif step.opname in _LOADS and index + 1 < len(steps):
            then = steps[index + 1]
            if then.opname in ("LOAD_METHOD", "LOAD_ATTR") and then.argval in _MUTATORS:
                found.add(str(step.argval))
    return frozenset(found).union(*map(mutated_names, nested_codes(code)))


def _container_of(steps: list[dis.Instruction], store: int) -> set[str]:
    """The name before the expression of the key, if the container is a plain name."""
    depth = 0
    for index in range(store - 1, 0, -1):
        step = steps[index]
        if step.opname == "COPY" and steps[index - 1].opname == "COPY":  # container[key] += value
            before = steps[index - 3] if index >= 3 else step
            return {str(before.argval)} if before.opname in _LOADS else set()
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth == 1:
            before = steps[index - 1]
            return {str(before.argval)} if before.opname in _LOADS else set()
    return set()


def _constant(value: Any) -> str:
    """A constant of a code object, without a trace of hash order."""
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"tuple {list(map(_constant, value))}"
    return f"{type(value).__qualname__}:{value!r}"
