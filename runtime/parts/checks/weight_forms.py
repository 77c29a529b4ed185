"""Forms of the weights that compiled code reads, compared with those that it was made for.

Code is bound to tensors, and a tensor may take another form while it stays the same object, as in
`weight.data = weight.data.double()`. Code and the graphs that are captured of it would read its
memory as what it no longer is.
"""

from __future__ import annotations

from collections.abc import Callable

from ....compile.plan.compiled_model import CompiledModel
from ....errors import ModelChanged
from ....torch_compat.basics.tensors import form_test, inference_and_grad
from .step_reads import ALL_EVERY, STEPS_WITH_ALL


class WeightForms:
    """The forms of the weights that the code of one call form is bound to. All are compared at
    once, by one test that is made again for each mode of torch."""

    def __init__(self, compiled: CompiledModel) -> None:
        self._compiled = compiled
        self._weights = tuple(compiled.weights.values())
        self._tests: dict[tuple[bool, bool], Callable[..., bool]] = {}
        self._steps = 0

    def check_step(self, context: object = None, tensors: object = None) -> None:
        """Compare in the first steps, in one of ALL_EVERY, and while a form is another one."""
        self._steps += 1
        if self._steps <= STEPS_WITH_ALL or self._steps % ALL_EVERY == 0:
            self.check_all()

    def check_all(self, context: object = None, tensors: object = None) -> None:
        """Raises ModelChanged for a weight of another form."""
        mode = inference_and_grad()
        test = self._tests.get(mode)
        if test is not None and test(*self._weights):
            return
        if fault := self._compiled.misfit():
            self._steps = 0
            raise ModelChanged(changes=fault)
        self._tests[mode] = form_test(self._weights, any_strides=False)
