"""An engine serves two models in each of two threads; each step equals eager, bit for bit.

Prompts in chunks, speculation, LoRA adapters, an engine's buffers, a KV cache that compiled code
writes, one that an op writes, weights that are replaced between steps, captures in between under
all strategies, poison on. All numbers are small integers, so that every order of additions gives
the same sum.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from piecegraph import (
    Batch,
    ForwardContext,
    GraphMode,
    Lazy,
    RuntimeMode,
    forward_context,
    get_forward_context,
)

from .conftest import compile_once, prepare_on_replay

pytestmark = pytest.mark.compile

MAX_TOKENS, MAX_REQS, HIDDEN, VOCABULARY, MODULUS = 16, 6, 4, 50, 97
CONTEXT, SLOTS = 24, 200
RESERVED = SLOTS - 1  # the slot that padding may write to
DRAFTS, ADAPTERS = 2, 2


@dataclass
class Metadata:
    """For each token its cache slot and those it attends to, in tensors that stay in place."""

    slots: Tensor = field(default_factory=lambda: torch.full((MAX_TOKENS,), RESERVED))
    table: Tensor = field(default_factory=lambda: torch.full((MAX_TOKENS, CONTEXT), RESERVED))
    mask: Tensor = field(default_factory=lambda: torch.zeros(MAX_TOKENS, CONTEXT))

    def clear(self):
        self.slots.fill_(RESERVED)
        self.table.fill_(RESERVED)
        self.mask.zero_()

    def set(self, token, seen):
        """`token` attends to the cache slots `seen`; the last of them is its own."""
        self.slots[token] = seen[-1]
        self.table[token, : len(seen)] = torch.tensor(seen)
        self.mask[token, : len(seen)] = 1


def attend(query, out, cache):
    """Sum of the cache rows that each token sees; some tokens that are padding see nothing."""
    metadata = get_forward_context().metadata
    seen = cache[metadata.table[: len(query)]] * metadata.mask[: len(query), :, None]
    torch.remainder(seen.sum(1) + query, MODULUS, out=out)


def store_and_attend(query, out, layer):
    context = get_forward_context()
    cache = context.layers[layer]
    cache.index_copy_(0, context.metadata.slots[: len(query)], query)
    attend(query, out, cache)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(whole(HIDDEN), requires_grad=False)
        self.adapters = nn.Parameter(whole(ADAPTERS + 1, HIDDEN), requires_grad=False)
        with torch.no_grad():
            self.adapters[0] = 0

    def forward(self, x, adapter_ids):
        return (x * self.weight + self.adapters[adapter_ids]).remainder(MODULUS)


class Model(nn.Module):
    """Its first cache is written by compiled code, its second by an op that finds it by name."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Parameter(whole(VOCABULARY, HIDDEN), requires_grad=False)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.register_buffer("cache", torch.zeros(SLOTS, HIDDEN))

    def forward(self, ids, positions, rope, slots, adapter_ids):
        x = self.embedding[ids] + positions[:, None].remainder(5) + rope.sum(0)[:, None]
        for index, layer in enumerate(self.layers):
            x = layer(x, adapter_ids)
            out = torch.empty_like(x)
            if index == 0:
                self.cache.index_copy_(0, slots, x)
                torch.ops.engine_loop.attend(x, out, self.cache)
            else:
                torch.ops.engine_loop.store_and_attend(x, out, "kv")
            x = (x + out).remainder(MODULUS)
        return x, x.sum(1)


def whole(*shape):
    return torch.randint(1, 9, shape).float()


@dataclass
class Request:
    """A sequence: the slots of its tokens, and how many tokens of its prompt are left."""

    prompt_left: int
    tokens_left: int
    adapter: int
    slots: list[int] = field(default_factory=list)


class Served:
    """A prepared model, and the same model run eagerly on caches of its own."""

    def __init__(self, model, compiled, **settings):
        self.model, self.plain = model, copy.deepcopy(model)
        self.kv, self.plain_kv = torch.zeros(SLOTS, HIDDEN), torch.zeros(SLOTS, HIDDEN)
        self.layers, self.plain_layers = {"kv": self.kv}, {"kv": self.plain_kv}
        self.metadata, self.plain_metadata = Metadata(), Metadata()
        self.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        self.rope = torch.zeros(3, MAX_TOKENS, dtype=torch.int64)
        self.modes = Counter()
        self.releases = 0
        config, traced = compiled
        buffers = {"positions": self.positions, "rope": self.rope}
        self.prepared = prepare_on_replay(
            replace(traced, model=model, conditions=None).rebound(),
            config.changed(**settings), GraphMode.FULL_AND_PIECEWISE, (1, 3, 6, 9, 12),
            self.layers, {"poison_old_results": True}, buffers,
        )  # fmt: skip
        self.watch()

    def watch(self):
        self.prepared.watch("kv", self.layers["kv"])
        for name, tensor in vars(self.metadata).items():
            self.prepared.watch(name, tensor)

    def dummy_metadata(self, descriptor, mode):
        self.metadata.clear()
        return self.metadata

    def step(self, batch, scheduled):
        """Run one step of requests with their numbers of new tokens, and compare."""
        n = batch.num_tokens
        decision = self.prepared.dispatch(batch)  # may capture, and clear the metadata
        self.modes[decision.mode] += 1
        for metadata in (self.metadata, self.plain_metadata):
            metadata.clear()
            token = 0
            for request, length in scheduled:
                for end in range(len(request.slots) - length, len(request.slots)):
                    metadata.set(token, request.slots[: end + 1][-CONTEXT:])
                    token += 1
        ids = torch.randint(VOCABULARY, (n,))
        self.positions[:n] = torch.randint(100, (n,))
        self.rope[:, :n] = torch.randint(9, (3, n))
        slots = self.plain_metadata.slots[:n].clone()
        adapter_ids = torch.tensor([r.adapter for r, length in scheduled for _ in range(length)])
        arguments = ids, self.positions[:n], self.rope[:, :n], slots, adapter_ids
        results = self.prepared.run(decision, *arguments, metadata=self.metadata)
        context = ForwardContext(self.plain_layers, self.plain_metadata, num_tokens=n)
        with forward_context(context), torch.no_grad():
            expected = self.plain(*arguments)
        for got, wanted in zip(results, expected, strict=True):
            assert torch.equal(got, wanted), (decision, self.prepared.config.strategy)
        for cache, plain in ((self.layers["kv"], self.plain_layers["kv"]),
                             (self.model.cache, self.plain.cache)):  # fmt: skip
            assert torch.equal(cache[:RESERVED], plain[:RESERVED]), (decision, "KV cache")
        results[0].unsqueeze_(0)  # what a caller does to a result concerns no later step

    def change(self, choice):
        """Replace weights, a layer or a cache between two steps, or free and capture graphs."""
        model, plain, prepared = self.model, self.plain, self.prepared
        if choice == 0:  # in place: nothing to follow
            new = whole(HIDDEN)
            model.layers[0].weight.copy_(new)
            plain.layers[0].weight.copy_(new)
            return
        if choice == 1:
            new = whole(VOCABULARY, HIDDEN)
            model.embedding = nn.Parameter(new, requires_grad=False)
            plain.embedding = nn.Parameter(new.clone(), requires_grad=False)
        elif choice == 2:
            model.layers[-1] = Layer()
            plain.layers[-1] = copy.deepcopy(model.layers[-1])
        elif choice == 3:
            self.layers["kv"] = self.layers["kv"].clone()
            self.watch()
        elif self.releases % 2:
            prepared.release(keep="plan")
        else:
            prepared.release()
            prepared.capture()
            prepared.seal()
        self.releases += choice == 4
        prepared.refresh()


class Engine:
    """A target and a draft model with the same requests; `serve` runs in one thread."""

    def __init__(self, seed, target, draft):
        self.random, self.target, self.draft = random.Random(seed), target, draft
        self.free = list(range(RESERVED))
        self.requests = []
        self.fault = None

    def serve(self, steps):
        try:
            for served in (self.target, self.draft):
                served.prepared.capture(served.dummy_metadata)
                served.prepared.seal()
            for step in range(steps):
                if step % 9 == 8:
                    served = self.random.choice((self.target, self.draft))
                    served.change(self.random.randrange(5))
                self.step()
                if step % 20 == 19:
                    self.draft.prepared.parts.strategies.idle(1e6)
        except BaseException as fault:
            self.fault = fault

    def step(self):
        """One step of each model over the same tokens."""
        while len(self.requests) < MAX_REQS and self.random.random() < 0.4:
            prompt, tokens = self.random.randint(1, 20), self.random.randint(1, 25)
            self.requests.append(Request(prompt, tokens, self.random.randint(0, ADAPTERS)))
        prefilling = [r for r in self.requests if r.prompt_left]
        length = self.random.choice((1, DRAFTS + 1))
        scheduled = []
        budget = MAX_TOKENS
        for request in self.requests:
            if budget:
                most = request.prompt_left or length
                new = min(most, budget, self.random.randint(1, 8) if request.prompt_left else most)
                if prefilling or new == length:
                    scheduled.append((request, new))
                    budget -= new
        if not scheduled:
            return
        for request, new in scheduled:
            request.slots += [self.free.pop(self.random.randrange(len(self.free)))
                              for _ in range(new)]  # fmt: skip
        adapters = {r.adapter for r, _ in scheduled}
        batch = Batch(
            sum(new for _, new in scheduled), len(scheduled), is_decode=not prefilling,
            query_len=None if prefilling else length,
            num_loras=len(adapters) if adapters != {0} else 0,
        )  # fmt: skip
        self.target.step(batch, scheduled)
        self.draft.step(batch, scheduled)
        for request, new in scheduled:
            self._advance(request, new)

    def _advance(self, request, new):
        if request.prompt_left:
            request.prompt_left -= new
            return
        accepted = self.random.randint(1, new)
        rejected = new - accepted
        for _ in range(rejected):
            self.free.append(request.slots.pop())
        request.tokens_left -= accepted
        if request.tokens_left <= 0:
            self.free += request.slots
            self.requests.remove(request)


def compiled(model):
    rows = "int64[num_tokens]"
    return compile_once(
        model,
        splitting_ops=("engine_loop::attend", "engine_loop::store_and_attend"),
        inputs={
            "ids": rows,
            "positions": rows,
            "rope": "int64[3, num_tokens]",
            "slots": rows,
            "adapter_ids": rows,
        },
        steps={
            "padding": {"slots": RESERVED, "ids": "repeat", "rope": "keep"},
            "after_seal": "raise",
        },
        variants={"query_lens": (1, DRAFTS + 1), "max_loras": ADAPTERS},
        max_num_tokens=MAX_TOKENS,
        max_num_reqs=MAX_REQS,
    )


@pytest.fixture(scope="module", autouse=True)
def ops(temporary_op):
    schema = "(Tensor query, Tensor(a!) out, Tensor cache) -> ()"
    temporary_op("engine_loop::attend", schema, attend)
    schema = "(Tensor query, Tensor(a!) out, str layer) -> ()"
    temporary_op("engine_loop::store_and_attend", schema, store_and_attend)


@pytest.mark.parametrize("steps", [24, pytest.param(1000, marks=pytest.mark.heavy)])
def test_each_step_of_an_engine_equals_eager(steps):
    """`steps` of each of two threads, each with two models: 2,000 in the long form."""
    torch.manual_seed(0)
    target, draft = Model(3), Model(2)
    of_target, of_draft = compiled(target), compiled(draft)
    engines = [
        Engine(
            0,
            Served(target, of_target, strategy="eager"),
            Served(draft, of_draft, strategy="delayed"),
        ),
        Engine(
            1,
            Served(copy.deepcopy(target), of_target, strategy=Lazy(max_bytes=6000)),
            Served(copy.deepcopy(draft), of_draft, strategy="lazy"),
        ),
    ]
    threads = [threading.Thread(target=engine.serve, args=(steps,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        if engine.fault is not None:
            raise engine.fault
        for served in (engine.target, engine.draft):
            assert served.modes.keys() == set(RuntimeMode)
