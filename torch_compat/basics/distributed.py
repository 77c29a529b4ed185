"""The store of a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def process_group_store(group: dist.ProcessGroup | None) -> Any:
    """A connection of its own to the store of `group`: a wait on it blocks no other use."""
    of_group: Any = dist.group.WORLD if group is None else group
    return of_group.get_group_store().clone()
