"""Hugging Face models with the library: their attention becomes one splitting op.

`adapt` routes the attention of a transformers model to `piecegraph_hf::attention`; `PackedModel`
takes the tokens of all requests in one row. For each layer the op calls a function from the forward
context, by default `attend_packed`. A model that would give a request in a step something else than
alone is refused, which `PackedModel` proves for each class and configuration (proof.py).
"""

from .adapt import INPUTS, SETTINGS, PackedModel, adapt
from .attention import SPLITTING_OP, PackedRequests, Rule, attend_packed
from .rope import settle_rope

__all__ = [
    "INPUTS",
    "SETTINGS",
    "SPLITTING_OP",
    "PackedModel",
    "PackedRequests",
    "Rule",
    "adapt",
    "attend_packed",
    "settle_rope",
]
