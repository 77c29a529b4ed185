"""Models that read a value in one of many ways. `<<2.0|3.0>>` is what differs in the two variants.

A case is the source of a module with `build()`, which returns the model; a helper module, imported
as `helper`, stands below a line `#helper`. `enter()`, `leave()` surround a start. Each variant is
run by a process of its own on the cache of the first.
"""

from __future__ import annotations

from . import absent, aliases, classes, folded, functions, modules, operators, process
from .attributes import ATTRIBUTE_MODULE, ATTRIBUTES
from .unread import UNREAD, UNREAD_MODEL

HEAD = """
import abc, collections, contextlib, dataclasses, enum, functools, math, os, types, weakref
import numpy, torch
from torch import nn
import torch.nn.functional as F
"""


def sources() -> dict[str, str]:
    """The source of every case by name, both variants in one."""
    attributes = {
        f"attribute_{name}": ATTRIBUTE_MODULE.replace("VALUE", value).replace("RESULT", result)
        for name, (value, result) in ATTRIBUTES.items()
    }
    subjects = (absent, aliases, folded, functions, classes, operators, modules, process)
    others = {name: source for each in subjects for name, source in each.CASES.items()}
    return {name: HEAD + source for name, source in {**attributes, **others}.items()}


def unread_sources() -> dict[str, str]:
    """Cases whose variants give the same result for the same reason."""
    models = {
        name: UNREAD_MODEL.replace("MADE", made).replace("RESULT", result)
        for name, (made, result) in UNREAD.items()
    }
    return {
        f"unread_{name}": HEAD + source for name, source in {**models, **folded.NEEDLESS}.items()
    }
