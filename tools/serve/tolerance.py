"""How far a right result may be from the eager model's."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Absolute and relative, for outputs behind a norm: compiled code adds up in another order."""
