"""`Settings`: the base of configuration classes, with readable errors and a useful `help()`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ...errors import InvalidSetting, UnknownSetting

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

EXPECTED = "Input should be "
"""The start of pydantic's messages that say what a value must be."""


class _SettingsType(ModelMetaclass):
    """Keeps pydantic's own attributes out of `dir()` and `help()`, and lists the settings there.

    Docstrings of fields are read from the source when they are asked for: pydantic reads them when
    a class is made, for which Python looks into every imported module.
    """

    @property
    def __doc__(cls) -> str:  # type: ignore[override]
        own = inspect.cleandoc(vars(cls).get("__doc__") or "")
        return f"{own}\n\nSettings and their defaults:\n\n{_listed(cls)}"

    def __dir__(cls) -> list[str]:
        own = [vars(base) for base in cls.__mro__ if not base.__module__.startswith("pydantic")]
        names = {name for base in own for name in (*base, *base.get("__annotations__", ()))}
        return sorted(name for name in names if not name.startswith(("_", "model_")))


class Settings(BaseModel, metaclass=_SettingsType):
    """Immutable settings. Unknown names and invalid values raise InvalidSetting.

    Each field has a docstring, which `help()` of the class shows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _first_problem(type(self), settings, error) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        settings = inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD)
        cls.__signature__ = inspect.Signature([settings])


def field_docstrings(cls: type) -> dict[str, str]:
    """The docstring below each field of a settings class; empty without its source."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not isinstance(owner, _SettingsType):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(owner))
        except OSError:
            continue
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in pairwise(definition.body):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[field.target.id] = inspect.cleandoc(str(below.value.value))
    return found


def _listed(cls: Any) -> str:
    """Each field with its default and, indented, its docstring."""
    docstrings = field_docstrings(cls)
    fields = []
    for name, field in cls.model_fields.items():
        value = field.get_default(call_default_factory=True)
        value = getattr(value, "name", value) if isinstance(value, int) else value
        lines = docstrings.get(name, "").splitlines()
        head = name if field.is_required() else f"{name} = {str(value) or repr(value)}"
        fields.append("\n".join([head, *(f"    {line}" for line in lines)]))
    return "\n\n".join(fields)


def _first_problem(
    cls: type[BaseModel], settings: Mapping[str, Any], error: ValidationError
) -> InvalidSetting:
    """The first problem in `error`, without pydantic's own names and phrases."""
    first, *_ = problems = error.errors()
    path, message = first["loc"], first["msg"]
    if first["type"] == "extra_forbidden":
        return _unknown(cls, settings, path)
    name, value = _located(settings, path)
    reason = message.removeprefix("Value error, ")
    expected = f"a value that help({cls.__name__}) allows"
    if message.startswith(EXPECTED):
        same = [problem["msg"] for problem in problems if problem["loc"][:1] == path[:1]]
        reason, expected = _reason(first), " or ".join(dict.fromkeys(map(_expected, same)))
    return InvalidSetting(name=name, value=value, reason=reason, expected=expected)


def _unknown(
    cls: type[BaseModel], settings: Mapping[str, Any], path: tuple[int | str, ...]
) -> UnknownSetting:
    *outer, name = path
    owner, known = _located(settings, tuple(outer))[0] if outer else cls.__name__, cls.model_fields
    near = [] if outer else get_close_matches(str(name), list(known), 1)
    guess = f" (did you mean {near[0]!r}?)" if near else ""
    return UnknownSetting(owner=owner, name=name, guess=guess, config=cls.__name__)


def _reason(problem: Mapping[str, Any]) -> str:
    kind, value = problem["type"], problem["input"]
    if kind == "enum":
        choices = problem["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        near = get_close_matches(str(value), choices, 1)
        return f"unknown choice (did you mean {near[0]!r}?)" if near else "unknown choice"
    if kind.startswith(("greater", "less")):
        return "it is out of range"
    return f"its type is {type(value).__name__}"


def _expected(message: str) -> str:
    """The value that a message of pydantic expects, as in "Choose …"."""
    text = message.removeprefix(EXPECTED).split(", unable")[0]
    text = text.replace("a valid integer", "an integer").replace("a valid", "a")
    return f"a number {text}" if text.startswith(("greater", "less")) else text


def _located(settings: Mapping[str, Any], path: tuple[int | str, ...]) -> tuple[str, Any]:
    """The innermost given value on `path`, and its name as a user would write it."""
    if not path:
        return "settings", dict(settings)
    name, value = str(path[0]), settings.get(str(path[0]))
    for part in path[1:]:
        try:
            value = value[part]  # type: ignore[index]
        except (TypeError, KeyError, IndexError):
            break  # in pydantic's path the name of a type follows
        name += f"[{part!r}]"
    return name, value
