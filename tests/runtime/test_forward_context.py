"""The forward context exists in a step only, per thread, and is restored on errors."""

import pytest

from piecegraph.errors import OutsideStep
from piecegraph.runtime.forward_context import (
    ForwardContext,
    forward_context,
    get_forward_context,
)
from tests.processes import in_a_thread


def test_a_step_sees_its_context():
    context = ForwardContext({"layer.0": object()}, metadata="m", num_tokens=3)
    with forward_context(context):
        assert get_forward_context() is context
        with forward_context(ForwardContext({})) as inner:
            assert get_forward_context() is inner
        assert get_forward_context() is context


def test_outside_a_step_there_is_none():
    with pytest.raises(OutsideStep, match="no step is running"):
        get_forward_context()


def test_w23_an_error_restores_the_context():
    with pytest.raises(ValueError, match="mine"):
        with forward_context(ForwardContext({})):
            raise ValueError("mine")
    with pytest.raises(OutsideStep):
        get_forward_context()


def test_threads_do_not_share_it():
    with forward_context(ForwardContext({})), pytest.raises(OutsideStep):
        in_a_thread(get_forward_context)


def test_it_has_no_other_attributes():
    with pytest.raises(AttributeError):
        ForwardContext({}).batch = 1
