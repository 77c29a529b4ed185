"""Gives a command the options of `piecegraph run`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from ..serve.options import RunOptions, declared_options, read_run_options


def with_run_options(command: Callable[..., int]) -> Callable[..., int]:
    """`command`, whose first parameter is a RunOptions, as a function of the options as typed."""
    shared = declared_options()
    _, *rest = inspect.signature(command).parameters.values()
    hints = get_type_hints(command, include_extras=True)
    parameters = [p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name]) for p in rest]
    run_hints = get_type_hints(RunOptions)
    for each in shared:
        typed = run_hints[each.field] if isinstance(each.typed, str) else each.typed
        parameters.append(
            inspect.Parameter(
                each.parameter,
                inspect.Parameter.KEYWORD_ONLY,
                default=each.default or None if each.default == () else each.default,
                annotation=Annotated[typed, typer.Option(each.flag, **each.typer)],
            )
        )

    def run_with_options(**given: Any) -> int:
        typed = {each.parameter: given.pop(each.parameter) for each in shared}
        return command(read_run_options(**typed), **given)

    run_with_options.__name__ = command.__name__
    run_with_options.__doc__ = command.__doc__
    run_with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    run_with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run_with_options
