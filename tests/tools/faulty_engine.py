"""A small decoder with a paged cache, and an engine that runs decode steps of it: for planted
faults. `CHANGES` is what a fault changes before a step; everything is put back by `engine`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.nn import functional

from piecegraph import Batch, get_forward_context
from piecegraph.tools.bisect import BisectCase, Step
from tests.ops import define

HIDDEN, OWN, REQUESTS = 8, 4, 16
DUMP = REQUESTS * OWN
SIZES = (3, 5, 4, 2, 7, 3, 6)
KNOBS = {}
WORKSPACE = torch.zeros(HIDDEN)
SCALES = [1.0, 1.0]

LIBRARY = torch.library.Library("engine", "DEF")


def attend(x, out, layer):
    """Each row goes to its slot; the mean of the request's rows is added to it."""
    context = get_forward_context()
    metadata, kv = context.metadata, context.layers[layer].kv
    if KNOBS.get("scale"):  # over all rows
        x = x / x.abs().sum() * len(x)
    kv.index_copy_(0, metadata.slots[: len(x)], x)
    rows, lens = kv[metadata.table[: len(x)]], metadata.lens[: len(x)]
    rows = rows * (torch.arange(OWN) < lens[:, None])[..., None]
    out.copy_(x + rows.sum(1) / lens.clamp(min=1)[:, None])
    if len(x) == KNOBS.get("attend_wrong_at"):
        out.mul_(1.5)
    if KNOBS.get("workspace"):
        out.add_(WORKSPACE)
        WORKSPACE.add_(1)
    if KNOBS.get("counts_rows"):
        out.mul_(context.num_tokens or len(x))


def norm(x):
    x = functional.rms_norm(x, (HIDDEN,))
    return x * 2 if len(x) == KNOBS.get("norm_wrong_at") else x


define(LIBRARY, "attend(Tensor x, Tensor(a!) out, str layer) -> ()", attend)
define(LIBRARY, "norm(Tensor x) -> Tensor", norm, torch.empty_like)


class Decoder(torch.nn.Module):
    """`change` is what a fault adds after the layers; numbers that it chooses are the result."""

    def __init__(self, change=lambda model, x: x):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(32, HIDDEN)
        self.up = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.down = torch.nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("cos", torch.linspace(0.5, 1.5, 64)[:, None].repeat(1, HIDDEN))
        self.register_buffer("seen", torch.zeros(1))
        self.experts = [torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2)]
        self.change = change
        self.requires_grad_(False)

    def forward(self, ids, positions):
        x = self.embed(ids)
        for number, up in enumerate(self.up):
            x = up(torch.ops.engine.norm(x)) * self.cos[positions]
            out = torch.empty_like(x)
            torch.ops.engine.attend(x, out, f"l{number}")
            x = functional.silu(out)
        x = self.change(self, torch.ops.engine.norm(x))
        return self.down(x) if x.is_floating_point() else x


@dataclass
class Engine:
    """The buffers of metadata, and the layers; `change(engine, step)` runs before each step."""

    model: Decoder
    change: Callable[[Engine, int], None] = lambda engine, step: None
    keeps_padding: tuple[str, ...] = ()

    def __post_init__(self):
        dtype = self.model.down.weight.dtype
        self.pool = torch.zeros(3 * (DUMP + 1), HIDDEN, dtype=dtype)
        self.layers = {f"l{n}": SimpleNamespace(kv=self.kv(n)) for n in range(2)}
        self.slots = torch.full((REQUESTS,), DUMP)
        self.table = torch.full((REQUESTS, OWN), DUMP)
        self.lens = torch.ones(REQUESTS, dtype=torch.int64)

    def kv(self, place):
        return self.pool[place * (DUMP + 1) : (place + 1) * (DUMP + 1)]

    def fill(self, padded, size=0, position=0):
        for name, value in (("slots", DUMP), ("table", DUMP), ("lens", 1)):
            if not size or name not in self.keeps_padding:
                getattr(self, name)[:padded] = value
        requests = torch.arange(size)
        self.slots[:size] = requests * OWN + position
        self.table[:size] = requests[:, None] * OWN + torch.arange(OWN)
        self.lens[:size] = position + 1
        return SimpleNamespace(
            slots=self.slots[:padded], table=self.table[:padded], lens=self.lens[:padded]
        )

    def step(self, number, size):
        def metadata(decision):
            self.number, self.size = number, size
            self.change(self, number)
            filled = self.fill(decision.descriptor.num_tokens, size, number % OWN)
            return KNOBS.get("metadata", lambda it, filled, number: filled)(self, filled, number)

        generator = torch.Generator().manual_seed(number)
        inputs = torch.randint(32, (size,), generator=generator), torch.full((size,), number)
        return Step(inputs, Batch(size, size, is_decode=True, query_len=1), metadata)

    def case(self, config, sizes=SIZES):
        steps = [self.step(number, size) for number, size in enumerate(sizes)]
        padding = lambda descriptor, mode: self.fill(descriptor.num_tokens)  # noqa: E731
        return BisectCase(self.model, config, steps, self.layers, padding)


@contextlib.contextmanager
def changed_process(**knobs):
    """The faults in the ops, and the process as before at the end."""
    dtype = torch.get_default_dtype()
    KNOBS.update(knobs)
    try:
        yield
    finally:
        KNOBS.clear()
        WORKSPACE.zero_()
        SCALES[:] = [1.0, 1.0]
        torch.set_default_dtype(dtype)


def from_step(first, change, back=None):
    """A change of the engine at a step, undone before it: stages run all steps again."""

    def at(engine, step):
        if step >= first:
            change(engine)
        elif back is not None:
            back(engine)

    return at
