"""What the tensor tracker sees of a capture; on CUDA it works without a tape."""

import pytest
import torch

from piecegraph.runtime.backends.ownership import Ownership, TensorTracker

from .conftest import found_by


@pytest.fixture
def watch():
    return TensorTracker("CPU", Ownership())


def watched(watch, fn, *args):
    watch.start()
    try:
        return fn(*args)
    finally:
        watch.stop()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_are_made_and_arguments_are_found(watch, mode):
    with mode():
        x, weight = torch.rand(2, 3), torch.rand(4, 3)
        result = watched(watch, lambda x: torch.nn.functional.linear(x, weight).view(-1), x)
        assert watch.ownership.is_made(result)
        found = {tensor.data_ptr() for tensor in found_by(watch.ownership)}
        assert found == {x.data_ptr(), weight.data_ptr()}


def test_failure_12_what_the_body_of_a_custom_op_reads_is_found(watch, temporary_op):
    metadata = torch.rand(3)

    def attend(q, out):
        out.copy_(q * metadata)

    temporary_op("watch_tests::attend", "(Tensor q, Tensor(a!) out) -> ()", attend)
    q, out = torch.rand(3), torch.zeros(3)
    watched(watch, torch.ops.watch_tests.attend.default, q, out)
    found = {tensor.data_ptr() for tensor in found_by(watch.ownership)}
    assert found == {q.data_ptr(), out.data_ptr(), metadata.data_ptr()}


def test_arguments_and_results_of_a_piece_are_seen_not_its_inside(watch):
    hidden, x = torch.rand(3), torch.rand(3)
    result, same = watched(watch, lambda x: watch.opaque(lambda x: (x * hidden, x), (x,)), x)
    assert watch.ownership.is_made(result)
    assert same is x
    assert [tensor.data_ptr() for tensor in found_by(watch.ownership)] == [x.data_ptr()]


def test_nothing_is_seen_after_the_stop(watch):
    watched(watch, torch.neg, torch.rand(2))
    assert not watch.ownership.is_made(torch.rand(2).neg())
