"""What a custom op consists of: its schemas and the code behind it, by part."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from ...cache.keys.code import code_parts
from ...cache.keys.encoder import Undescribable, function_text
from ...torch_compat.basics.ops import (
    custom_op_function,
    fake_function,
    is_composite,
    op_name,
    overloads,
    registering_files,
    schemas,
)


def op_parts(op: Any) -> dict[str, str]:
    """Schemas of a custom op and the Python code that implements it, by part.

    An op made by `torch.library.custom_op` is known by its function. Of one registered through
    `Library` torch keeps no function, only the files that did it: their content counts. If the op
    is a composition, which is inlined, so do the functions of these modules as loaded.
    """
    parts = op_signature(op)
    if function := custom_op_function(op_name(op)):
        return {**parts, **code_parts(function, ".function")}
    files = {file for overload in overloads(op) for file in registering_files(overload.name())}
    contents = sorted(hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files)
    parts |= {f".file[{n}]": content for n, content in enumerate(contents)}
    if any(map(is_composite, overloads(op))):
        for name, function in _functions_in(files):
            try:
                parts |= code_parts(function, f".{name}")
            except Undescribable:  # the op may not call it
                parts[f".{name}"] = function_text(function)
    return parts


def _functions_in(files: Collection[str]) -> Iterator[tuple[str, FunctionType]]:
    """The functions of the modules that were loaded from `files`."""
    for module in sorted(sys.modules):
        if getattr(sys.modules[module], "__file__", None) in files:
            for name, value in sorted(vars(sys.modules[module]).items()):
                if isinstance(value, FunctionType) and value.__module__ == module:
                    yield f"{module}.{name}", value


def op_signature(op: Any) -> dict[str, str]:
    """Schemas of a custom op and its fake implementation: what a caller of it depends on."""
    fake = fake_function(op_name(op))
    parts = {f".schema[{n}]": schema for n, schema in enumerate(schemas(op))}
    return {**parts, **(code_parts(fake, ".fake") if fake else {})}
