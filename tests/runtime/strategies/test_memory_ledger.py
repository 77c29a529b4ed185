"""Each byte has one owner, and the plan's utilizations give the same KV cache."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.runtime.backends.protocol import Memory
from piecegraph.runtime.parts.strategies.ledger import MemoryLedger, Owner, plan_memory

owners = st.sampled_from(list(Owner))
ranges = st.tuples(owners, st.sampled_from("ab"), st.integers(0, 40), st.integers(0, 15))


@given(st.lists(ranges, max_size=20))
def test_each_byte_belongs_to_who_entered_it_first(entries):
    ledger, oracle = MemoryLedger(), {}
    for owner, device, start, length in entries:
        ledger.own_range(owner, device, start, start + length)
        for address in range(start, start + length):
            oracle.setdefault((device, address), owner)
    for owner in Owner:
        assert ledger.bytes(owner) == sum(each is owner for each in oracle.values())
    assert ledger.total == len(oracle)


def test_views_aliases_and_tied_weights_are_counted_once():
    weight, other = torch.zeros(10), torch.zeros(3)
    ledger = MemoryLedger()
    assert ledger.own(Owner.WEIGHTS, [weight, weight[2:5], weight.detach(), other]) == 52
    assert ledger.own(Owner.KV_CACHE, [weight.view(2, 5), torch.zeros(2)]) == 8
    ledger.state("graph pool PIECEWISE", 7)
    ledger.state("graph pool PIECEWISE", 5)
    assert {row["owner"]: row["bytes"] for row in ledger.rows()} == {
        "weights": 52,
        "KV cache": 8,
        "graph pool PIECEWISE": 5,
    }


def test_w17_graphs_are_taken_off_once():
    ledger = MemoryLedger()
    ledger.state(Owner.WEIGHTS, 300)
    ledger.state(Owner.KV_CACHE, 55)
    memory = Memory(used=405, free=595)  # 50 bytes have no owner
    plan = plan_memory(memory, ledger, graphs=100, utilization=0.9)
    assert plan.kv_cache == 900 - 350 - 100


def test_what_other_processes_use_is_left_to_them():
    ledger = MemoryLedger()
    ledger.state(Owner.WEIGHTS, 300)
    plan = plan_memory(Memory(used=300, free=500, other=200), ledger, graphs=0, utilization=0.9)
    assert (plan.total, plan.other, plan.kv_cache) == (1000, 500, 400)


def test_a_device_that_is_too_small_leaves_nothing():
    ledger = MemoryLedger()
    ledger.state(Owner.WEIGHTS, 2000)
    assert plan_memory(Memory(900, 100), ledger, 10, 0.9).kv_cache == 0
