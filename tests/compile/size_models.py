"""Bodies of models that treat sizes specially: sound and unsound to serve for 1 to 2048 tokens.

An unsound one is right only for some sizes; the line that makes it so is marked.
"""

import inspect

import torch
from torch.nn import functional as F

MARK = "# unsound"

# unsound


def multiple_of_128(m, x):
    if x.shape[0] % 128 == 0:  # unsound
        return x * 2
    return m.linear(x)


def one_token(m, x):
    if x.shape[0] == 1:
        return x * 2
    return m.linear(x)


def at_least_two(m, x):
    if x.shape[0] > 1:
        return m.linear(x)
    return x


def large_batch(m, x):
    if x.shape[0] >= 1024:  # unsound
        return x - 1
    return m.linear(x)


def asserted(m, x):
    assert x.shape[0] <= 500  # unsound
    return m.linear(x)


def squeezed(m, x):
    return m.linear(x).squeeze(0)  # unsound


def broadcast(m, x):
    return m.linear(x) + torch.ones(17, 8)  # unsound


def unrolled(m, x):
    for row in range(x.shape[0]):  # unsound
        x = x + row
    return m.linear(x)


def fixed_rows(m, x):
    y = m.linear(x)
    return y.narrow(0, 3, 2)  # unsound


def last_five(m, x):
    return m.linear(x).unfold(0, 5, 1).sum(-1)  # unsound


def halves(m, x):
    first, second = m.linear(x).chunk(2, 0)  # unsound
    return torch.cat([second, first])


def as_number(m, x):
    scale = 0.5 if x.shape[0] > 100 else 1.0  # unsound
    return m.linear(x) * scale


# sound


def linear(m, x):
    return m.linear(x).relu()


def first_half(m, x):
    return m.linear(x)[: x.shape[0] // 2]


def at_most_four(m, x):
    return m.linear(x)[: min(x.shape[0], 4)]


def first_hundred(m, x):
    return m.linear(x)[:100]


def six_rows(m, x):
    return m.linear(x)[3:9]


def all_but_five(m, x):
    return m.linear(x)[:-5]


def padded(m, x):
    return F.pad(m.linear(x), (0, 0, 0, 3))[: x.shape[0]]


def heads(m, x):
    return m.linear(x).view(x.shape[0], 2, 4).transpose(0, 1).reshape(2, -1)


def last_row(m, x):
    return m.linear(x)[-1]


def rounded_up(m, x):
    rows = (x.shape[0] + 7) // 8 * 8
    return F.pad(m.linear(x), (0, 0, 0, rows - x.shape[0]))


def true_for_all(m, x):
    if x.shape[0] < 1:
        return x
    return m.linear(x)


def below_the_limit(m, x):
    torch._check(x.shape[0] <= 4096)
    return m.linear(x)


def chosen_by_data(m, x):
    return torch.where(x.sum() > 0, m.linear(x), x)


def repeated(m, x):
    return m.linear(x).repeat_interleave(3, 0)


BODIES = [each for each in list(globals().values()) if inspect.isfunction(each)]
UNSOUND = [body for body in BODIES if MARK in inspect.getsource(body)]
CHOOSING = [one_token, at_least_two]
"""Sound as two traces, of which the choice is made with a size."""
SOUND = [body for body in BODIES if body not in UNSOUND + CHOOSING]
