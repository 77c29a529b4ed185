"""First imports of torch's compilers while other threads of the process import, too.

Dynamo and Inductor import each other. If one thread begins with the one and another with the other,
Python ends the deadlock by giving both a module that is imported by half, and every later
`torch.compile` of the process fails. Here other threads wait at the door: this one holds the import
lock of each module of torch that nobody has imported yet. It waits for nobody while it holds one.
"""

from __future__ import annotations

import pkgutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib import _bootstrap
from pathlib import Path
from typing import Any

import torch

from ..basics.patch import preserve_cache_variables
from .dynamo import import_dynamo

ROOTS = ("torch", "functorch")


def import_alone(load: Callable[[], object], checkpoint: Callable[[], None]) -> None:
    """Call `load`, which imports, while no other thread imports a module of torch.

    Others that try meanwhile wait. `checkpoint` is called while imports that have begun end.
    """
    while True:
        checkpoint()
        with preserve_cache_variables(), ExitStack() as held:
            if _all_held(held):
                load()
                return
        time.sleep(0.01)


def import_tracer() -> None:
    """What a trace needs, and its table of torch's functions, before some of them are replaced."""
    import_dynamo()
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map()


def _all_held(held: ExitStack) -> bool:
    """Take all locks without waiting; False if another thread is inside of an import of torch."""
    get_lock: Callable[[str], Any] = _bootstrap._get_module_lock  # type: ignore[attr-defined]
    # An import takes the lock of its module first, and then that of its package.
    for name in set(_modules()).difference(sys.modules):
        lock = get_lock(name)
        if lock.owner is not None:
            return False
        lock.acquire()
        held.callback(lock.release)
    return not any(map(_is_imported_by_half, tuple(sys.modules.values())))


@cache
def _modules() -> tuple[str, ...]:
    """All modules of torch. Each entry of a folder gives other threads a turn while it is read."""
    folders, names = [(root, Path(torch.__file__).parents[1] / root) for root in ROOTS], [*ROOTS]
    for package, folder in folders:
        for found in pkgutil.iter_modules([str(folder)]):
            names.append(f"{package}.{found.name}")
            if found.ispkg:
                folders.append((names[-1], folder / found.name))
    return tuple(names)


def _is_imported_by_half(module: Any) -> bool:
    spec = getattr(module, "__spec__", None)
    root = str(getattr(spec, "name", "")).partition(".")[0]
    return root in ROOTS and bool(getattr(spec, "_initializing", False))
