"""Random programs of tensor operations: a recording equals the program, on any input."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.events import Events
from piecegraph.runtime.backends.replay.backend import ReplayBackend, ReplayOptions
from piecegraph.runtime.capture.breaks import break_graph, opaque_piece
from piecegraph.runtime.capture.recorder import record
from piecegraph.runtime.capture.session import capture_session

SHAPE = (4, 6)


def _put(state, value):
    state.append(value)


@break_graph
def _eager_out(q, out):
    out.copy_(q.cumsum(0))


@break_graph
def _eager_fresh(q):
    return q.flip(0)


def _attend(state, i, j):
    out = torch.empty_like(state[i])
    _eager_out(state[i], out)
    state.append(out)


_fused = opaque_piece(lambda a, b: (a.tanh() * b, a - b))

OPS = [
    lambda s, i, j: _put(s, s[i] + s[j]),
    lambda s, i, j: _put(s, s[i].mul(0.5)),
    lambda s, i, j: _put(s, s[i].t().reshape(SHAPE)),
    lambda s, i, j: _put(s, s[i].view(6, 4).t().contiguous().view(SHAPE)),
    lambda s, i, j: _put(s, torch.softmax(s[i], -1)),
    lambda s, i, j: _put(s, s[i][[3, 1, 0, 2]]),
    lambda s, i, j: _put(s, torch.cat([s[i][:2], s[j][2:]])),
    lambda s, i, j: _put(s, torch.where(s[i] > 0, s[j], s[i])),
    lambda s, i, j: _put(s, s[i]),
    lambda s, i, j: s[i].add_(0.25),
    lambda s, i, j: s[i][1:3].copy_(s[j][:2].clone()),
    lambda s, i, j: s[i].t()[2].zero_(),
    lambda s, i, j: torch.neg(s[i], out=s[j]),
    lambda s, i, j: s.extend(_fused(s[i], s[j])),
    _attend,
    lambda s, i, j: _put(s, _eager_fresh(s[i])),
]

steps = st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 9), st.integers(0, 9))


@given(
    program=st.lists(steps, max_size=12),
    breaks=st.booleans(),
    inference=st.booleans(),
    seed=st.integers(0, 99),
)
def test_replay_equals_the_program(program, breaks, inference, seed):
    torch.manual_seed(seed)

    def run(x, weight):
        state = [x, weight]
        for op, i, j in program:
            OPS[op](state, i % len(state), j % len(state))
        return tuple(state)

    with torch.inference_mode(inference), torch.no_grad():
        backend = ReplayBackend(ReplayOptions(poison_before_replay=True))
        mine = (torch.rand(SHAPE), torch.rand(SHAPE))
        true = tuple(tensor.clone() for tensor in mine)
        with capture_session(backend, backend.new_pool(), Events(), prepare=False) as session:
            recording = record(run, mine, session, name="program", breaks=breaks)
        mine[1].copy_(true[1])  # the warm-up run may have written to it
        for _ in range(3):
            fresh = torch.rand(SHAPE)
            mine[0].copy_(fresh)
            true[0].copy_(fresh)
            recording.replay()
            for got, expected in zip(recording.outputs, run(*true), strict=True):
                assert torch.equal(got, expected)
