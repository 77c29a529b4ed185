"""What a capture made and what it found: identities outlive the tensors."""

import torch
from torch import nn

from piecegraph.runtime.backends.ownership import Ownership

from .conftest import found_by


def test_a_new_tensor_is_never_taken_for_a_freed_one():
    ownership = Ownership()
    for _ in range(100):
        ownership.make(torch.rand(7))
    assert not any(ownership.is_made(torch.rand(7)) for _ in range(100))


def test_views_belong_to_the_owner_of_their_memory():
    ownership = Ownership()
    made, found = torch.rand(4), torch.rand(4)
    ownership.make(made)
    ownership.find([made[1:], found[2:], found])
    assert ownership.is_made(made.view(2, 2))
    assert not ownership.is_made(found)
    assert len(found_by(ownership)) == 1


def test_a_found_tensor_keeps_its_memory_when_the_original_gets_new_data():
    ownership = Ownership()
    weight = nn.Parameter(torch.ones(3))
    ownership.find([weight])
    assert list(ownership.moved()) == []
    then = weight.data_ptr()
    weight.data = torch.zeros(3)
    assert found_by(ownership)[0].tolist() == [1, 1, 1]
    ((recorded, now),) = ownership.moved()
    assert (recorded, now is weight) == (then, True)


def test_a_freed_original_has_not_moved():
    ownership = Ownership()
    ownership.find([torch.ones(3)])
    assert list(ownership.moved()) == []
    assert found_by(ownership)[0].tolist() == [1, 1, 1]
