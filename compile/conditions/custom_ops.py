"""What a custom op consists of: its schemas and the code behind it, by part."""

from __future__ import annotations

from typing import Any

from ...torch_compat.basics.frames import is_torch_file
from ...torch_compat.basics.ops import (
    custom_op_function,
    fake_function,
    op_name,
    overload_name,
    overloads,
    registered_function,
    schemas,
    traced_kernels,
)
from .code import code_parts
from .values import Undescribable, function_text


def op_parts(op: Any) -> dict[str, str]:
    """Schemas of a custom op and the Python code that implements it, by part.

    An op made by `torch.library.custom_op` is known by its function. Of one registered through
    `Library` those functions count that run while it is traced: a composition is inlined.
    """
    parts = op_signature(op)
    if function := custom_op_function(op_name(op)):
        return {**parts, **code_parts(function, ".function")}
    for overload in overloads(op):
        for key in traced_kernels(overload):
            parts |= kernel_parts(overload, key)
    return parts


def kernel_parts(overload: Any, key: str) -> dict[str, str]:
    """The function that is registered for an op at a dispatch key, as it is now, by part."""
    registered = registered_function(overload, key)
    if registered is None:
        raise Undescribable(f"{overload_name(overload)}[{key}]", "is no Python function")
    function, bound = registered
    place = f".{overload_name(overload).rpartition('.')[2]}[{key}]"
    if is_torch_file(function.__code__.co_filename):  # such as the one around a fake function
        return {place: function_text(function)}
    parts = code_parts(function, place)
    for name, value in bound.items():
        parts |= code_parts(value, f"{place}.{name}")
    return parts


def op_signature(op: Any) -> dict[str, str]:
    """Schemas of a custom op and its fake implementation: what a caller of it depends on."""
    fake = fake_function(op_name(op))
    parts = {f".schema[{n}]": schema for n, schema in enumerate(schemas(op))}
    return {**parts, **(code_parts(fake, ".fake") if fake else {})}
