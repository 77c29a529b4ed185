"""What a configuration of transformers says: read, listed and changed in one place.

Layers may have values of their own (`config.per_layer_config`), which are values of the layer: the
configuration raises where one of them is read as that of the whole model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

Path = tuple[Any, ...]
"""Where a configuration has a whole number: names of attributes, keys and indices."""

TOKEN = re.compile(r"token_(id|ids|index)$")
LAYERS = "per_layer_config"


def setting(config: Any, name: str, default: Any = None) -> Any:
    """A value of a configuration; that of the first layer where layers have their own."""
    own = layer_values(config)
    return own[0][name] if own and name in own[0] else getattr(config, name, default)


def layer_values(config: Any) -> dict[int, dict[str, Any]]:
    """What layers have of their own, for each layer by its index; empty where they have nothing."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    names = config.per_layer_attributes
    return {
        index: {"skip": layer.skip, **{name: getattr(layer, name) for name in names}}
        for index, layer in enumerate(config.per_layer_config)
    }


def special_tokens(config: PreTrainedConfig) -> dict[str, int]:
    """Token ids that the configuration names, by the name of the setting."""
    ids = ((path, value) for path, value in integers(config) if is_token(path))
    return {".".join(map(str, path)): value for path, value in ids if value >= 0}


def integers(node: Any, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """All whole numbers of a configuration, with their paths."""
    items: Any = ()
    if isinstance(node, PreTrainedConfig):
        own = layer_values(node)
        names = [n for n in vars(node) if not n.startswith("_") and n not in own.get(0, ())]
        items = [*((name, vars(node)[name]) for name in names), (LAYERS, own)]
    elif isinstance(node, dict):
        items = node.items()
    elif isinstance(node, (list, tuple)):
        items = enumerate(node)
    elif not isinstance(node, bool) and (
        isinstance(node, int) or (isinstance(node, float) and node.is_integer())
    ):
        yield path, int(node)
    for key, value in items:
        yield from integers(value, (*path, key))


def is_token(path: Path) -> bool:
    """Whether a path is that of a token id."""
    return any(isinstance(key, str) and TOKEN.search(key) for key in path)


def changed(config: PreTrainedConfig, values: Mapping[Path, int]) -> PreTrainedConfig:
    """A copy of `config` with other whole numbers; raises what its class raises."""
    config = copy.deepcopy(config)
    layers: dict[int, tuple[Any, Any]] = {}
    for path, value in values.items():
        node: Any = config
        for key in path[:-1]:
            if not isinstance(node, PreTrainedConfig):
                node = node[key]
            elif key == LAYERS:
                node = layers.setdefault(id(node), (node, layer_values(node)))[1]
            else:
                node = getattr(node, key)
        if isinstance(node, PreTrainedConfig):
            setattr(node, path[-1], type(getattr(node, path[-1]))(value))
        else:
            node[path[-1]] = type(node[path[-1]])(value)
    for node, own in layers.values():
        node.per_layer_config = own
    return config


def settle_sets(model: nn.Module) -> None:
    """Give sets that modules hold, such as one of layer types, the order of their texts: a forward
    that walks a set is another program in another process."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, (set, frozenset)) and not name.startswith("_"):
                setattr(module, name, tuple(sorted(value, key=repr)))
