"""Heads: what a model does with the hidden states of its base model, such as pooling and scoring.

A head takes the rows of one request, so it runs for each request, outside of steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....errors import ModelNotAdaptable


class Head:
    """The forward of `model` without its base model, whose class of results is `output`."""

    def __init__(self, model: PreTrainedModel, output: type) -> None:
        self._base = _Computed(model.base_model, output)
        shared: dict[int, Any] = {id(weight): weight for weight in model.parameters()}
        self._model = copy.deepcopy(model, {**shared, id(model.base_model): self._base})

    def __call__(self, hidden: Tensor, input_ids: Tensor, query_lens: Sequence[int]) -> list[Any]:
        """The model's result for each request of a step, from hidden states (T, hidden) and ids
        (T,)."""
        results, start = [], 0
        for length in query_lens:
            rows = slice(start, start + length)
            self._base.hidden = hidden[rows]
            with torch.no_grad():
                results.append(self._model(input_ids=input_ids[None, rows]))
            start += length
        return results


def find_head(model: PreTrainedModel, ids: Tensor) -> Head | None:
    """The head of `model`, or None if its result is the hidden states; `ids` (1, T) are a request.

    Raises ModelNotAdaptable for a model whose result is not that of its head.
    """
    with torch.no_grad():
        expected, base = model(input_ids=ids), model.base_model
        if "last_hidden_state" in expected:
            return None
        below = base(input_ids=ids)
        head = Head(model, type(below))
        try:
            (actual,) = head(below.last_hidden_state[0], ids[0], (ids.shape[1],))
        except Exception:  # code of the model, in a form that it was not written for
            actual = None
    if actual is None or not torch.allclose(actual[0], expected[0], rtol=1e-3, atol=1e-5):
        raise ModelNotAdaptable(
            family=f"{type(model).__name__} ({model.config.model_type})",
            reason="its head takes more of the base model than hidden states",
            advice="Adapt the base model, model.base_model, and run the head for each request",
        )
    return head


class _Computed(nn.Module):
    """Stands for a base model whose hidden states are known."""

    hidden: Tensor

    def __init__(self, base: Any, output: type) -> None:
        super().__init__()
        self._pooler, self._output = getattr(base, "pooler", None), output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.hidden[None]
        pooled = {} if self._pooler is None else {"pooler_output": self._pooler(hidden)}
        return self._output(last_hidden_state=hidden, **pooled)
