"""Which keys a configuration field feeds, stated at the field.

    class Config(BaseModel):
        level: int                                                  # feeds every key
        capture_sizes: Annotated[tuple[int, ...], Feeds(("capture",), "the code is for any size")]
        verbose: Annotated[bool, exempt("only what is shown")]

The default is every key: a missing annotation costs a recompilation, not a wrong result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Feeds:
    """Annotation of a field that feeds only the keys of these `kinds`, and the `reason`."""

    kinds: tuple[str, ...]
    reason: str

    def __repr__(self) -> str:
        return "Feeds"  # `help()` of a configuration shows it with every field


def exempt(reason: str) -> Feeds:
    """Annotation of a field that feeds no key."""
    return Feeds((), reason)


def exemptions(model: type[BaseModel]) -> dict[str, Feeds]:
    """The fields of a configuration that do not feed every key, for documents and reviews."""
    return {name: feeds for name in model.model_fields if (feeds := _feeds(model, name))}


def config_factors(config: BaseModel, kind: str) -> dict[str, Any]:
    """The fields of `config` that feed keys of `kind`, nested configurations with their class."""
    model = type(config)
    named = {
        name: _value(getattr(config, name), kind)
        for name in model.model_fields
        if (feeds := _feeds(model, name)) is None or kind in feeds.kinds
    }
    return named | {name: _value(v, kind) for name, v in (config.model_extra or {}).items()}


def _feeds(model: type[BaseModel], name: str) -> Feeds | None:
    metadata = model.model_fields[name].metadata
    return next((item for item in metadata if isinstance(item, Feeds)), None)


def _value(value: Any, kind: str) -> Any:
    if hasattr(type(value), "model_fields"):
        return {"class": type(value).__qualname__, **config_factors(value, kind)}
    if isinstance(value, Mapping):
        return {name: _value(item, kind) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_value(item, kind) for item in value]
    return value
