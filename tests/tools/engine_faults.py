"""Twenty faults of engines, planted in the reference engine from what is public of it, and what the
tools say of each: its proved steps, its report, and `piecegraph bisect` of a wrong step.

They were written down, with what each is to be called, before a tool was run on them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

import piecegraph
from piecegraph.tools.engine import attention, engine, metadata, model
from piecegraph.tools.engine.kv_cache import LayerCache
from piecegraph.tools.serve import run

from .shadow_scenes import EAGER, MODEL, SHADOW, said

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Planted:
    """`names` are texts of which one says the true cause; none if no tool does. `true` are words of
    FALSE that hold."""

    what: str
    plant: Callable[[Patch], list[str] | None]
    names: tuple[str, ...]
    true: str = ""


FALSE = ("earlier step", "padding", "how many rows", "moved", "another form", "random")
"""Words for causes, which a text may have only where they are true."""


class Running:
    """The model and the layers of the engine that runs, and changes before a step of it."""

    def __init__(self, patch, **given):
        self.model = None
        self.layers = {}
        right = run.prepare

        def prepare(model, config, **settings):
            self.model, self.layers = model, settings["layers"]
            return right(model, config, **settings, **given)

        patch.setattr(run, "prepare", prepare)

    def before_step(self, patch, number, change):
        right, steps = engine.ReferenceEngine.next_step, count(1)

        def next_step(self):
            if next(steps) == number:
                change()
            return right(self)

        patch.setattr(engine.ReferenceEngine, "next_step", next_step)


def decoding(patch, fault):
    """`fault(right, query, key, value, output, cache, metadata)` is the attention of decodes."""
    patch.setattr(attention, "_decode", partial(fault, attention._decode))


def filling(patch, fault):
    """`fault(host, query_lens)` changes the rows of metadata before they are uploaded."""
    right = metadata.MetadataBuffers._upload

    def upload(self, host, **facts):
        fault(host, facts["query_lens"])
        return right(self, host, **facts)

    patch.setattr(metadata.MetadataBuffers, "_upload", upload)


def forwarding(patch, after):
    """`after(model, x)` is the result of the model."""
    right = model.Decoder.forward

    def forward(self, input_ids, positions, lora_rows=None, lora_adapters=None):
        return after(self, right(self, input_ids, positions, lora_rows, lora_adapters))

    patch.setattr(model.Decoder, "forward", forward)


def holding(patch, **values):
    """The model has these attributes; tensors are buffers."""
    right = model.Decoder.__init__

    def init(self, *args, **kwargs):
        right(self, *args, **kwargs)
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value.clone(), persistent=False)
            else:
                setattr(self, name, value)

    patch.setattr(model.Decoder, "__init__", init)


def scaled_by_rows(patch):
    def fault(right, query, key, value, output, *others):
        right(query, key, value, output, *others)
        output.mul_(1 + 0.05 * len(query))

    decoding(patch, fault)


def quantized_together(patch):
    """Keys are written in steps of a scale that all rows of the batch share."""

    def fault(right, query, key, *others):
        scale = key.abs().mean() / 3
        right(query, (key / scale).round() * scale, *others)

    decoding(patch, fault)


def padding_writes_the_last_slot(patch):
    def fault(host, query_lens):
        if tokens := sum(query_lens):
            host[0][tokens:] = host[0][tokens - 1]

    filling(patch, fault)


def double_buffered_slots(patch):
    right, steps = metadata.MetadataBuffers.fill, count()

    def fill(self, *given):
        filled = right(self, *given)
        if next(steps) % 2:
            filled = replace(filled, slot_mapping=filled.slot_mapping.clone())
        return filled

    patch.setattr(metadata.MetadataBuffers, "fill", fill)


def temperature_of_all_requests(patch):
    """Attention is scaled by the mean length of the requests, those of padding among them."""

    def fault(right, query, *others):
        lens = others[-1].seq_lens.float()
        right(query * lens.mean().log1p(), *others)

    decoding(patch, fault)


def rope_table_replaced(patch):
    running = Running(patch)

    def change():
        running.model.cos = running.model.cos * 0.9
        running.model.sin = running.model.sin * 0.9

    running.before_step(patch, 5, change)


def rope_scale_changed(patch):
    holding(patch, rope_scale=1.0)
    right = model.rotate

    def rotate(x, cos, sin):
        return right(x, cos, sin)

    patch.setattr(model, "rotate", rotate)
    forwarding(patch, lambda self, x: x * self.rope_scale)
    running = Running(patch)
    running.before_step(patch, 5, lambda: setattr(running.model, "rope_scale", 2.0))


def penalties_count_padding(patch):
    holding(patch, tokens_seen=torch.zeros(1))

    def after(self, x):
        self.tokens_seen.add_(torch.ones_like(x[:, 0]).sum())
        return x / (1 + self.tokens_seen)

    forwarding(patch, after)


def branch_on_the_batch(patch):
    def fault(right, query, *others):
        many = len(others[-1].query_lens) > 3
        right(query * 1.5 if many else query, *others)

    decoding(patch, fault)


def window_set_while_serving(patch):
    running = Running(patch)

    def change():
        name = next(iter(running.layers))
        running.layers[name] = replace(running.layers[name], window=2)

    running.before_step(patch, 5, change)


def cache_grown(patch):
    running = Running(patch)

    def change():
        name = next(iter(running.layers))
        old = running.layers[name]
        grown = (torch.cat([part, torch.zeros_like(part)]) for part in (old.keys, old.values))
        running.layers[name] = LayerCache(*grown, window=old.window)

    running.before_step(patch, 5, change)


def drafts_stated_as_one_token(patch):
    right = engine.to_batch

    def stated(schedule):
        batch = right(schedule)
        if not batch.is_decode:
            return batch
        return replace(batch, num_reqs=batch.num_tokens, query_len=1, max_query_len=1)

    patch.setattr(engine, "to_batch", stated)
    return ["--speculate", "2"]


def acceptance_in_the_model(patch):
    holding(patch, acceptance=[1.0])
    forwarding(patch, lambda self, x: x * self.acceptance[0])
    running = Running(patch)
    running.before_step(patch, 5, lambda: running.model.acceptance.__setitem__(0, 0.5))
    return ["--speculate", "2"]


def adapter_assigned(patch):
    running = Running(patch)

    def change():
        layer = running.model.layers[0].attention.q_proj
        layer.down = torch.nn.Parameter(layer.down * 3, requires_grad=False)

    running.before_step(patch, 5, change)
    return ["--lora", "2"]


PEERS = [0.5, 2.0]


def peers_reordered(patch):
    """A stand-in of a collective takes its peers in the order of a list."""
    patch.setitem(globals(), "PEERS", [0.5, 2.0])

    def fault(right, query, *others):
        right(query * PEERS[0], *others)

    decoding(patch, fault)
    Running(patch).before_step(patch, 5, lambda: PEERS.reverse())


def positions_in_int32(patch):
    right, steps = engine.ReferenceEngine.inputs, count(1)

    def inputs(self, *given):
        ids, positions, *others = right(self, *given)
        return (ids, positions.int() if next(steps) >= 5 else positions, *others)

    patch.setattr(engine.ReferenceEngine, "inputs", inputs)


def metadata_rewritten_too_early(patch):
    """The engine clears what it copies metadata from as soon as a step was started, and not when
    the copies are done. A proof waits for them."""
    delayed = piecegraph.ReplayBackend(
        piecegraph.ReplayOptions(delay=True, fail_on_early_writes=True)
    )
    Running(patch, backend=delayed)
    right = engine.ReferenceEngine.sampled

    def sampled(self, hidden, *others):
        for rows in self.buffers._staging:
            rows[:] = 0
        return right(self, hidden, *others)

    patch.setattr(engine.ReferenceEngine, "sampled", sampled)


def weights_assigned(patch):
    running = Running(patch)

    def change():
        state = {name: value * 1.1 for name, value in running.model.state_dict().items()}
        running.model.load_state_dict(state, assign=True)

    running.before_step(patch, 5, change)


def prefix_kept_in_python(patch):
    """The op remembers a key for each number of rows, and never forgets."""
    prefixes = {}

    def fault(right, query, *others):
        cache, given = others[-2:]
        right(query, *others)
        rows = len(query)
        held = prefixes.setdefault(rows, cache.keys[given.block_table[0, 0], 0].sum())
        others[-3].add_(held)

    decoding(patch, fault)


def hook_added(patch):
    running = Running(patch)

    def change():
        running.model.layers[1].mlp.register_forward_hook(lambda module, args, result: result * 2)

    running.before_step(patch, 5, change)


FAULTS = [
    Planted("attention is scaled by the rows of the batch", scaled_by_rows,
            ("operator=piecegraph_reference::paged_attention",), "how many rows"),
    Planted("keys are quantized by one scale for all rows", quantized_together,
            ("operator=piecegraph_reference::paged_attention",), "padding"),
    Planted("padding writes the slot of the last row", padding_writes_the_last_slot,
            ("paged_attention", "slot"), "padding"),
    Planted("slots are double-buffered", double_buffered_slots, ("slot_mapping moved",), "moved"),
    Planted("attention is scaled by the length of all requests", temperature_of_all_requests,
            ("operator=piecegraph_reference::paged_attention",), "padding how many rows"),
    Planted("the rope table is replaced by another", rope_table_replaced, ("cos moved",), "moved"),
    Planted("the scale of rope changes", rope_scale_changed, ("rope_scale",)),
    Planted("penalties count padding", penalties_count_padding, ("tokens_seen",), "padding"),
    Planted("attention has a branch on the batch", branch_on_the_batch, ("query_lens",)),
    Planted("a layer has a window from the fifth step on", window_set_while_serving, ("window",)),
    Planted("a layer's cache is reallocated", cache_grown,
            ("layers['layers.0.attention'].keys",), "moved another form"),
    Planted("drafts are stated as requests of one token", drafts_stated_as_one_token,
            ("query_len", "num_reqs", "requests")),
    Planted("the model scales by what drafts were accepted", acceptance_in_the_model,
            ("acceptance",)),
    Planted("an adapter is assigned", adapter_assigned, ("q_proj.down",), "moved"),
    Planted("ranks are taken in another order", peers_reordered, ()),  # no tool names it
    Planted("positions are int32", positions_in_int32, ("positions",)),
    Planted("metadata is rewritten too early", metadata_rewritten_too_early, ("metadata.py",)),
    Planted("all weights are assigned", weights_assigned, ("weight",), "moved"),
    Planted("an op keeps prefixes in Python", prefix_kept_in_python,
            ("paged_attention", "fault"), "how many rows"),
    Planted("a hook is added", hook_added, ("hook",)),
]  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What the tools print; `found` names how it was found."""

    found: str
    text: str

    @property
    def line(self):
        return self.text.splitlines()[-1]

    def names(self, fault):
        """Whether the cause is named."""
        return any(name in self.text for name in fault.names)

    def false(self, fault):
        """Causes that are named and are none."""
        line = self.line.replace("(padded to", "").replace("call refresh() to", "")
        return [word for word in FALSE if word in line and word not in fault.true]


def look(fault):
    """Serve with the fault, each step proved, and bisect the wrong step or the whole trace."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        options = [*EAGER, *(fault.plant(patch) or [])]
        report = Path(folder) / "report.json"
        status, out = said(["run", *MODEL, *options, *SHADOW, "--json", str(report)])
        if not report.exists():
            return Seen("refused", out)
        facts = json.loads(report.read_text())
        if facts["rows_mixed"]:
            return Seen("never padded", str(facts["rows_mixed"]))
        wrong = facts["shadow"]["wrong"]
        if wrong:
            _, found = said(["bisect", *MODEL, *options, "--replay", wrong[0]["file"]])
            out_of_service = f"{wrong[0]['out_of_service']} out of service"
            return Seen(out_of_service, f"{found.rstrip()}; changed: {wrong[0]['changed']}")
        status, found = said(["run", *MODEL, *options, "--set", "shadow.share=1e-9"])
        return Seen("refused" if status == 3 else "nothing", found)
