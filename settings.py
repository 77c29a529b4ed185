"""`Settings`: the base of configuration classes, with readable errors and a useful `help()`."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Mapping
from difflib import SequenceMatcher, get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import InvalidSetting, UnknownSetting

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

EXPECTED = "Input should be "
"""The start of pydantic's messages that say what a value must be."""

WIDTH = 74
"""The longest line of a list of settings: `help()` indents it by three."""

ALIKE = 0.6
"""How similar a name must be to be suggested, from 0 to 1."""

SAME_END = 0.2
"""What an equal last word adds to it: `compile_ranges` is most like `codegen.ranges`."""


class _SettingsType(ModelMetaclass):
    """Keeps pydantic's own attributes out of `dir()` and `help()`, and lists the settings there.

    Docstrings of fields are read from the source when they are asked for: pydantic reads them when
    a class is made, for which Python looks into every imported module.
    """

    @property
    def __doc__(cls) -> str:  # type: ignore[override]
        intro = inspect.cleandoc(vars(cls).get("__doc__") or "")
        return f"{intro}\n\n{_listed(cls)}"

    def __dir__(cls) -> list[str]:
        own = [vars(base) for base in cls.__mro__ if not base.__module__.startswith("pydantic")]
        names = {name for base in own for name in (*base, *base.get("__annotations__", ()))}
        return sorted(name for name in names if not name.startswith(("_", "model_")))


class Settings(BaseModel, metaclass=_SettingsType):
    """Immutable settings. Unknown names and invalid values raise InvalidSetting.

    Each field has a docstring. `help()` of the class shows the docstrings, or their first lines.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    _path: ClassVar[str] = ""
    """Where `Config` holds these settings, for errors."""
    _brief: ClassVar[bool] = False
    """Whether `help()` shows one line for each setting."""

    def __init__(self, **settings: Any) -> None:
        for name in settings.keys() & type(self).model_fields.keys():
            parts = _parts(type(self).model_fields[name].annotation)
            if len(parts) == 1 and isinstance(settings[name], dict):
                settings[name] = parts[0](**settings[name])
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _first_problem(type(self), settings, error) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        settings = inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD)
        cls.__signature__ = inspect.Signature([settings])

    def changed(self, **settings: Any) -> Self:
        """A copy with other settings. A dict for an object changes only what it names."""
        chosen = {name: getattr(self, name) for name in self.model_fields_set}
        for name, value in settings.items():
            top, dot, rest = name.partition(".")
            if top in type(self).model_fields:
                now = chosen.get(top, getattr(self, top))
                chosen[top] = _merged(now, {rest: value} if dot else value, dotted=bool(dot))
            else:
                chosen[name] = value
        return type(self)(**chosen)


def _merged(now: Any, value: Any, *, dotted: bool) -> Any:
    """The value of a setting after a change by `value`: by a dict, what it names inside of it.

    A dict with a `kind` is an object by itself.
    """
    if isinstance(now, Settings) and isinstance(value, dict) and "kind" not in value:
        return now.changed(**value)
    return {**now, **value} if dotted and isinstance(now, dict) else value


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
    """Each field with its default and, indented, its docstring; or one line each."""
    docstrings = field_docstrings(cls)
    fields = []
    for name, field in cls.model_fields.items():
        value = field.get_default(call_default_factory=True)
        value = getattr(value, "name", value) if isinstance(value, int) else value
        shown = type(value).__name__ if isinstance(value, Settings) else str(value) or repr(value)
        lines = docstrings.get(name, "").splitlines() or [""]
        if cls._brief:
            fields.append(f"{name:<15}{shown:<11}{lines[0]}"[:WIDTH])
            continue
        head = name if field.is_required() else f"{name} = {shown}"
        fields.append("\n".join([head, *(f"    {line}" for line in lines)]))
    return ("\n" if cls._brief else "\n\n").join(fields)


def setting_names(cls: type[BaseModel]) -> list[str]:
    """All settings of `cls`, those of objects among them by dotted name."""
    names: list[str] = []
    for name, field in cls.model_fields.items():
        names.append(name)
        for part in _parts(field.annotation):
            names += [f"{name}.{inner}" for inner in setting_names(part)]
    return list(dict.fromkeys(names))


def is_object(annotation: Any) -> bool:
    """Whether a setting is an object of settings."""
    return isinstance(annotation, type) and issubclass(annotation, Settings)


def _parts(annotation: Any) -> list[type[Settings]]:
    """The classes of settings that a value may be an instance of."""
    if is_object(annotation):
        return [annotation]
    return [part for argument in get_args(annotation) for part in _parts(argument)]


def nearest(name: str, settings: Collection[str]) -> str | None:
    """The one of `settings` that is most like `name`, with or without the name of its object."""

    def likeness(other: str) -> float:
        pairs = ((name, other), (name, other.rpartition(".")[2]))
        ratio = max(SequenceMatcher(None, *pair).ratio() for pair in pairs)
        return ratio + SAME_END * (_last_word(name) == _last_word(other))

    best = max(settings, key=likeness, default="")
    return best if likeness(best) >= ALIKE else None


def _last_word(name: str) -> str:
    return re.split(r"[._]", name)[-1]


def _first_problem(
    cls: type[Settings], settings: Mapping[str, Any], error: ValidationError
) -> InvalidSetting:
    """The first problem in `error`, without pydantic's own names and phrases."""
    first, *_ = problems = error.errors()
    path, message = first["loc"], first["msg"]
    if first["type"] == "extra_forbidden":
        return _unknown(cls, path)
    name, value = _located(cls, settings, path)
    reason = message.removeprefix("Value error, ")
    expected = f"a value that help({cls.__name__}) allows"
    if message.startswith(EXPECTED):
        same = [problem["msg"] for problem in problems if problem["loc"][:1] == path[:1]]
        reason, expected = _reason(first), " or ".join(dict.fromkeys(map(_expected, same)))
    return InvalidSetting(name=name, value=value, reason=reason, expected=expected)


def _reason(problem: Mapping[str, Any]) -> str:
    kind, value = problem["type"], problem["input"]
    if kind == "enum":
        choices = problem["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        near = get_close_matches(str(value), choices, 1)
        return f"unknown choice (did you mean {near[0]!r}?)" if near else "unknown choice"
    if kind.startswith(("greater", "less", "finite")):
        return "it is out of range"
    return f"its type is {type(value).__name__}"


def _expected(message: str) -> str:
    """The value that a message of pydantic expects, as in "Choose …"."""
    text = message.removeprefix(EXPECTED).split(", unable")[0]
    text = text.replace("a valid integer", "an integer").replace("a valid", "a")
    return f"a number {text}" if text.startswith(("greater", "less")) else text


def _unknown(cls: type[Settings], path: tuple[int | str, ...]) -> UnknownSetting:
    *outer, name = path
    for part in outer:
        if isinstance(part, str) and part in cls.model_fields:
            (cls,) = _parts(cls.model_fields[part].annotation)
    prefix = f"{cls._path}." if cls._path else ""
    near = nearest(str(name), setting_names(cls))
    guess = f" (did you mean {prefix + near!r}?)" if near else ""
    return UnknownSetting(name=f"{prefix}{name}", guess=guess, config=cls.__name__)


def _located(
    cls: type[Settings], settings: Mapping[str, Any], path: tuple[int | str, ...]
) -> tuple[str, Any]:
    """The innermost value that was passed on `path`, and its name as a user would write it."""
    if not path:
        return cls._path or "settings", dict(settings)
    name, value = str(path[0]), settings.get(str(path[0]))
    for part in path[1:]:
        try:
            value = value[part]  # type: ignore[index]
        except (TypeError, KeyError, IndexError):
            break  # in pydantic's path the name of a type follows
        name += f"[{part!r}]"
    return f"{cls._path}.{name}" if cls._path else name, value
