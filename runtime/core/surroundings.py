"""What surrounds a call of the engine, and changes what ops do."""

from __future__ import annotations

from ...errors import AutocastActive, ModeActive
from ...torch_compat.basics.tensors import (
    is_autocast_enabled,
    modes_of_others,
    num_dispatch_modes,
    num_function_modes,
)


def must_be_plain(action: str) -> None:
    """Raise AutocastActive or ModeActive where ops would be others than compiled code has.

    Hot: 0.15 us a step.
    """
    if is_autocast_enabled():
        raise AutocastActive(action=action)
    if (num_function_modes() or num_dispatch_modes()) and (modes := modes_of_others()):
        raise ModeActive(action=action, mode=type(modes[-1]).__qualname__)
