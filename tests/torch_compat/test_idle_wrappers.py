"""Wrappers of AOTAutograd that have nothing to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecegraph.torch_compat.faster.idle_wrappers import without_idle_wrappers


@pytest.mark.parametrize(
    ("body", "wrapped"),
    [
        (lambda x: x * 2, [1, 0, 1]),
        (lambda x: (x * 2).view(2, 2).split(1), [1, 0, 1]),
        (lambda x: (x.add_(1), x * 2)[1], [1, 1, 1]),
        (lambda x: x.view(2, 2), [1, 1, 1]),
    ],
)
def test_a_wrapper_with_nothing_to_do_runs_once_and_with_gradients(
    body: Any, wrapped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from functorch.compile import make_boxed_func
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch._functorch.aot_autograd import aot_function

    original = runtime_wrappers._create_runtime_wrapper
    calls: list[None] = []

    def create(*args: Any, **kwargs: Any) -> Any:
        run = original(*args, **kwargs)

        def counted(args: list[Any]) -> Any:
            calls.append(None)
            return run(args)

        return counted

    monkeypatch.setattr(runtime_wrappers, "_create_runtime_wrapper", create)
    counts = []
    with without_idle_wrappers():
        compiled = aot_function(
            body,
            lambda graph, _: make_boxed_func(graph.forward),
            keep_inference_input_mutations=True,
        )
        for with_gradients in (False, False, True):
            calls.clear()
            with torch.set_grad_enabled(with_gradients):
                results = compiled(torch.arange(4.0))
            counts.append(len(calls))
            torch.testing.assert_close(results, body(torch.arange(4.0)))
    assert counts == wrapped
