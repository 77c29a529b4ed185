"""Finds where a wrong number is made; see docs/bisect.md.

Names are imported on first use: the command line imports this package without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .climb import bisect as bisect
    from .finding import Finding as Finding
    from .script import reproduce as reproduce
    from .subject import Step as Step
    from .subject import Subject as Subject

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".climb": ("bisect",),
        ".finding": ("Finding",),
        ".script": ("reproduce",),
        ".subject": ("Step", "Subject"),
    },
)
