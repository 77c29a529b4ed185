"""The proof of a model class and configuration, made before a model is served.

A small copy (small.py) runs requests in several orders and companies, at the start of a row and far
into it, through the ops. Each must be what the copy's own forward gives for the request alone,
without position ids: row by row in float32, and in the dtype of the model with at most twice the
error. A module that gives another result for equal inputs becomes a mixer and the copy is proved
again. What still differs is refused, with the request, its row and the layer.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from .... import Config, Events
from ....cache import Entry, Key
from ....compile.conditions.code import fingerprint
from ....compile.conditions.values import Undescribable
from ....errors import ModelNotAdaptable
from ....runtime.setup.open_cache import open_cache
from .attention import UnknownAttention
from .configuration import setting, special_tokens
from .host_reads import check_readers, host_readers
from .mixers import UnknownCall
from .rope import settle_rope
from .routing import ONE_REQUEST, Routes, refusal, route
from .small import (
    NoCopy,
    build_calm,
    counterparts,
    hidden_states,
    is_stack,
    reach,
    rounding,
    small_configs,
)

TOLERANCE = 1e-3
"""Largest difference of a row in float32, relative to its norm."""
EQUAL = 1e-4
"""Largest difference of a tensor inside, relative to its largest value."""
WORST = 2.0
"""Most error in the dtype of the model, as a multiple of that of the request alone."""
MOVED = 10
"""One in so many rows may have another expert than alone, chosen by rounding."""
LONG, FILLER, FILLERS = 120, 128, 8
"""Tokens of the longest request where no length of the configuration asks for more, and of each
request in front of those that are compared far into a row."""
RUNNABLE = "Serve it in a dtype and on a device on which its own forward runs"
IN_FLOAT32 = "Serve it in float32, or one request per batch"
Order = tuple[int, ...]
ORDERS: tuple[Order, ...] = (
    (0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (3, 1), (2,), (*(-1,) * FILLERS, 1, 3, 4, 2)
)  # fmt: skip
"""Requests of the rows, by index; -1 is a filler."""
WITH_PADDING: tuple[Order, ...] = ((3, 5, 1), (5,))
PLAIN, PADDED = 3, 5

ModuleCalls = dict[tuple[str, int], tuple[dict[Any, Tensor], dict[Any, Tensor]]]
"""By module and number of its call: the rows of one request in what it takes and gives."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a model class and configuration needs to be served.

    `offset` is what its own forward adds to positions. `mixers` are layers that run request by
    request, one of each kind. The token `padding` is none to the model: requests contain none.
    `error` is what a row has by rounding, in 16 bits and with as many layers.
    """

    offset: int = 0
    mixers: tuple[str, ...] = ()
    padding: int | None = None
    error: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Different:
    """The first row whose result depends on other requests, with its error and tolerance.

    It belongs to the request at `place` of a step that runs the requests of `order`.
    """

    order: Order
    place: int
    row: int
    difference: float
    limit: float

    @property
    def request(self) -> int:
        return self.order[self.place]


def proven(model: PreTrainedModel, config: Config) -> Requirements:
    """The proof from the cache of `config`, or made and stored; raises ModelNotAdaptable."""
    settings = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
    text, events = json.dumps(settings, sort_keys=True, default=str), Events()
    try:
        code = fingerprint(type(model))
    except Undescribable as error:  # a class outside of transformers, whose code is in no version
        name = type(model).__name__
        events.emit("proof.not_kept", level=logging.WARNING, model=name, reason=str(error))
        return prove(model)
    factors = {
        "proof": _own_code(),
        "class": code,
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "attention": model.config._attn_implementation,
        "dtypes": sorted({str(weight.dtype) for weight in model.parameters()}),
        "device": model.device.type,
        "versions": [transformers.__version__, torch.__version__],
    }
    cache, key = open_cache(config, events), Key.of("proof", factors)
    entry = cache.lookup("proof", key, count=False)
    if isinstance(entry, Entry):
        kept: Any = dict(entry.meta)
        return Requirements(**{**kept, "mixers": tuple(kept["mixers"])})
    proof = prove(model)
    cache.publish("proof", key, asdict(proof), {})
    return proof


def _own_code() -> str:
    """The sources of the adapter: a proof by another one is not used."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def prove(model: PreTrainedModel) -> Requirements:
    """Prove the class and configuration of `model`, which may be on the meta device; raises
    ModelNotAdaptable."""
    began = time.perf_counter()
    try:
        proof = _proved(model)
    except ModelNotAdaptable:  # two equal scores of a few narrow heads are chosen by rounding
        proof = _proved(model, all_heads=True)
    return replace(proof, seconds=round(time.perf_counter() - began, 2))


def _proved(model: PreTrainedModel, all_heads: bool = False) -> Requirements:
    proof, kind = Requirements(), type(model)
    try:
        for config in small_configs(model, all_heads):
            own = build_calm(kind, config)
            own.load_state_dict(_like(copy.deepcopy(own), model).state_dict())
            settle_rope(own)
            known = counterparts(proof.mixers, kind, model.config, config)
            proof = _Bench(model, own, reach(config)).prove(replace(proof, mixers=known))
            mixers = counterparts(proof.mixers, kind, config, model.config)
            proof = replace(proof, mixers=mixers)
    except NoCopy as error:
        raise refusal(model, f"no small copy of it runs ({error})", RUNNABLE) from error
    return proof


class _Bench:
    """A small copy `own`, requests for it, and what its own forward gives for each alone.

    The requests: a long one, one of special tokens, one token, 12 and 40 tokens, and with padding.
    """

    def __init__(self, model: PreTrainedModel, own: PreTrainedModel, longest: int) -> None:
        requests, filler = _requests(own, max(2 * longest + 7, LONG))
        device = "cpu" if model.device.type == "meta" else model.device
        self.model, self.own = model, own.to(device)
        self.sizes = {n for weight in own.parameters() for n in weight.shape}
        self.requests, self.filler = [x.to(device) for x in requests], filler.to(device)
        self.alone = [_alone(own, ids).float() for ids in self.requests]
        if not torch.equal(_alone(own, self.requests[0]), self.alone[0]):
            reason = "its own forward gives a request another result after it has seen others"
            raise refusal(model, reason, ONE_REQUEST)
        self.offset = self._offset()

    def prove(self, proof: Requirements) -> Requirements:
        """`proof` and what this copy needs in addition; raises ModelNotAdaptable."""
        proof = replace(proof, offset=self.offset)
        while True:
            orders = ORDERS
            if proof.padding is None and len(self.requests) > PADDED:
                orders += WITH_PADDING
            try:
                routes = route(copy.deepcopy(self.own), proof.mixers)
                different = self._different(routes, orders)
            except (UnknownCall, UnknownAttention) as error:
                layer = error.layer
                if isinstance(error, UnknownCall) or layer in proof.mixers:
                    layer = layer.rpartition(".")[0]
                proof = self._with_mixer(proof, layer, str(error))
                continue
            if different is None:
                return replace(proof, error=max(proof.error, self._prove_dtype(proof, orders)))
            if different.difference <= 10 * (amplified := rounding(self.own)):
                reason = f"it is too sensitive to prove: float32 alone differs by {amplified:.0e}"
                raise refusal(self.model, f"{reason} from float64", ONE_REQUEST)
            if different.request == PADDED:
                proof = replace(proof, padding=self.model.config.pad_token_id)
                continue
            layer = self._mixing(routes, different)
            around = layer.rpartition(".")[0] if layer in routes.mixers else layer
            proof = self._with_mixer(proof, around, self._description(different, layer))

    def _with_mixer(self, proof: Requirements, layer: str, reason: str) -> Requirements:
        """Raises ModelNotAdaptable where that would be more than a layer, or is done already."""
        inner = self.own.get_submodule(layer).named_modules(prefix=layer)
        if not layer or layer in proof.mixers or any(is_stack(*named) for named in inner):
            raise refusal(self.model, reason, ONE_REQUEST)
        outside = (name for name in proof.mixers if not f"{name}.".startswith(f"{layer}."))
        return replace(proof, mixers=(*outside, layer))

    def _offset(self) -> int:
        """What the own forward adds to positions, as its modules are given them."""
        ids, expected = self.requests[PLAIN], self.alone[PLAIN]
        start, offsets = torch.arange(len(ids), device=ids.device), {0}
        for given, _ in self._calls_alone(self.own, ids).values():
            for value in (x.flatten() for x in given.values() if x.dtype == torch.int64):
                if torch.equal(value, start + value[0]):
                    offsets.add(int(value[0]))
        for offset in sorted(offsets):
            if _equal(_alone(self.own, ids, position_ids=(start + offset)[None]), expected):
                return offset
        reason = "the positions of its own forward are not 0, 1, 2 and a shift"
        raise refusal(self.model, reason, ONE_REQUEST)

    def _row(self, order: Order, other_than: int | None = None) -> list[Tensor]:
        """Requests, and one more so that no width is the number of tokens. With `other_than`, all
        but the request at this place have other tokens."""
        row = [self.filler if index < 0 else self.requests[index] for index in order]
        total = sum(map(len, row))
        row.append(self.filler[: next(n for n in count(1) if total + n not in self.sizes)])
        if other_than is None:
            return row
        return [ids if i == other_than else ids.flip(0) % 7 + 3 for i, ids in enumerate(row)]

    def _different(
        self, routes: Routes, orders: tuple[Order, ...], alone: list[Tensor] | None = None
    ) -> Different | None:
        """The first row whose result depends on other requests, or None. `alone` are the errors of
        rows of single requests in the dtype of the model."""
        for full_order in orders:
            order, results = self._results(routes, full_order)
            places = [place for place, index in enumerate(order) if index >= 0]
            known = [order[place] for place in places]
            pairs = zip(places, known, strict=True)
            errors = [row_errors(results[place], self.alone[index]) for place, index in pairs]
            limits = torch.full_like(torch.cat(errors), TOLERANCE)
            if alone is not None:  # of all requests together: single ones have few rows
                best = torch.cat([alone[index] for index in known])
                limits = row_limits(torch.cat(errors), best, self.model.dtype)
            parts = torch.split(limits, [len(rows) for rows in errors])
            for place, rows, limit in zip(places, errors, parts, strict=True):
                if (wrong := (~(rows <= limit)).nonzero()).numel():
                    row = int(wrong[0])
                    return Different(order, place, row, float(rows[row]), float(limit[row]))
        return None

    def _results(self, routes: Routes, order: Order) -> tuple[Order, list[Tensor]]:
        """With fewer fillers where a table of the model ends: a step of more tokens raises too."""
        while True:
            try:
                with host_readers(routes.model) as readers:
                    results = routes.run(self._row(order), self.offset)
                check_readers(readers, routes.mixers)
                return order, results
            except (IndexError, RuntimeError, ValueError) as error:
                if order[0] >= 0:
                    reason = f"packed requests raise {error!r}"
                    if layer := _raising(routes.model, error):
                        raise UnknownAttention(reason, layer) from error
                    raise refusal(self.model, reason, ONE_REQUEST) from error
            order = order[1:]

    def _prove_dtype(self, proof: Requirements, orders: tuple[Order, ...]) -> float:
        """In the dtype of the model, a request has at most WORST times the error of alone; returns
        the largest of a row alone, which grows with the root of the number of layers."""
        served = _like(copy.deepcopy(self.own), self.model)
        if all(weight.dtype == torch.float32 for weight in served.parameters()):
            return 0.0
        routes = route(copy.deepcopy(served), proof.mixers)
        pairs = zip(self.requests, self.alone, strict=True)
        alone = [row_errors(_alone(served, ids), exact) for ids, exact in pairs]
        if reason := _nothing_bounds(torch.cat(alone)):
            reason = f"in {self.model.dtype}, it is too sensitive to prove: {reason}"
            raise refusal(self.model, reason, IN_FLOAT32)
        if (different := self._different(routes, orders, alone)) is not None:
            layer = self._inexact(served, routes, different)
            reason = (
                f"in {self.model.dtype}, {self._description(different, layer)}; twice the error of"
                f" the request alone is {different.limit:.1e}"
            )
            raise refusal(self.model, reason, IN_FLOAT32)
        deeper = sum(1 for _ in self.model.modules()) / sum(1 for _ in self.own.modules())
        return float(torch.cat(alone).max()) * math.sqrt(max(deeper, 1.0))

    def _mixing(self, routes: Routes, different: Different) -> str:
        """The first module whose result for the request depends on other requests, though its
        inputs are equal; "" if there is none."""
        packed = self._calls_packed(routes, different)
        others = self._calls_packed(routes, different, different.place)
        for before in (others, self._calls_alone(self.own, self.requests[different.request])):
            for call, (given, result) in packed.items():
                known = before.get(call)
                if known and _alike(known[0], given) and not _alike(known[1], result):
                    return call[0]
        return ""

    def _inexact(self, served: PreTrainedModel, routes: Routes, different: Different) -> str:
        """The first module whose error is more than WORST times that of the request alone."""
        ids = self.requests[different.request]
        exact, alone = (self._calls_alone(model, ids) for model in (self.own, served))
        for call, (_, result) in self._calls_packed(routes, different).items():
            for key in result.keys() & exact.get(call, ({}, {}))[1].keys():
                want, best = exact[call][1][key].float(), alone[call][1][key]
                if (result[key] - want).norm() > WORST * (best - want).norm() + EQUAL * want.norm():
                    return call[0]
        return ""

    def _calls_packed(
        self, routes: Routes, different: Different, other_than: int | None = None
    ) -> ModuleCalls:
        row = self._row(different.order, other_than)
        run = lambda: routes.run(row, self.offset)  # noqa: E731
        return _calls(routes.model, row, different.place, run, routes.mixers)

    def _calls_alone(self, own: PreTrainedModel, ids: Tensor) -> ModuleCalls:
        return _calls(own, [ids], 0, lambda: _alone(own, ids))

    def _description(self, different: Different, layer: str) -> str:
        ids = self.requests[different.request]
        row = sum(map(len, self._row(different.order)[: different.place]))
        return (
            f"a request of {len(ids)} tokens from row {row} of a step differs from its result"
            f" alone by {different.difference:.1e}, first at its token {different.row}"
            f" (id {int(ids[different.row])}); the first layer to differ is"
            f" {layer or 'its forward'} ({type(self.own.get_submodule(layer)).__name__})"
        )


def _calls(
    model: nn.Module,
    row: list[Tensor],
    place: int,
    run: Callable[[], Any],
    mixers: Collection[str] = (),
) -> ModuleCalls:
    """What all modules outside of mixers take and give for the request at `place` of a row."""
    tokens, start = sum(map(len, row)), sum(map(len, row[:place]))
    calls: ModuleCalls = {}

    def parts(value: Any, key: tuple[Any, ...] = ()) -> dict[Any, Tensor]:
        if isinstance(value, Tensor) and tokens in value.shape:
            for dim in (d for d, n in enumerate(value.shape) if n == tokens):
                value = value.narrow(dim, start, len(row[place]))
            return {key: value.clone()}
        items: Any = value.items() if isinstance(value, Mapping) else ()
        if isinstance(value, (tuple, list)):
            items = enumerate(value)
        return {n: x for name, item in items for n, x in parts(item, (*key, name)).items()}

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            number = sum(name == known for known, _ in calls)
            calls[name, number] = parts({**dict(enumerate(args)), **kwargs}), parts(output)

        return hook

    inside = tuple(f"{name}." for name in mixers)
    hooks = [
        module.register_forward_hook(look(name), with_kwargs=True)
        for name, module in model.named_modules()
        if not name.startswith(inside)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _raising(model: nn.Module, error: BaseException) -> str:
    """The module of `model` whose own code raised `error`, such as one for positions; "" if none
    did."""
    names = {module: name for name, module in model.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    inner = [names[each] for each in frames if isinstance(each, nn.Module) and each in names]
    return inner[-1] if inner else ""


def _alone(own: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    return hidden_states(own, input_ids=ids[None], **inputs)[0]


def _requests(own: PreTrainedModel, longest: int) -> tuple[list[Tensor], Tensor]:
    """The requests of a bench, and a filler; as long as the own forward accepts."""
    generator = torch.Generator().manual_seed(0)
    embedding: Any = own.get_input_embeddings()
    known = embedding.num_embeddings
    padding = setting(own.config, "pad_token_id")
    special = {token for name, token in special_tokens(own.config).items()
               if token < known and name != "pad_token_id"}  # fmt: skip
    tokens = torch.tensor(sorted(special), dtype=torch.int64)

    def ordinary(length: int) -> Tensor:
        return torch.randint(3, max(min(known, 500), 4), (length,), generator=generator)

    while True:
        long = ordinary(longest)
        try:
            hidden_states(own, input_ids=long[None])
            break
        except (IndexError, RuntimeError):
            longest //= 2
            if not longest:
                raise
    long[5 : 5 + len(tokens)] = tokens[: len(long[5 : 5 + len(tokens)])]
    short = torch.cat([ordinary(3), tokens, ordinary(2), tokens.flip(0)])[:longest]
    requests = [long, short, *(ordinary(min(n, longest)) for n in (1, 12, 40))]
    if isinstance(padding, int) and 0 <= padding < known and padding not in special:
        at = torch.tensor([padding])
        requests.append(torch.cat([ordinary(4), at, ordinary(3), at, at])[:longest])
    return requests, ordinary(min(FILLER, longest))


def _like(own: PreTrainedModel, model: PreTrainedModel) -> PreTrainedModel:
    """`own` with each weight and buffer in the dtype that `model` has it in."""
    named = chain(model.named_parameters(), model.named_buffers())
    dtypes = {name: tensor.dtype for name, tensor in named if tensor.is_floating_point()}
    for name, tensor in chain(own.named_parameters(), own.named_buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtypes.get(name, model.dtype))
    return own


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """The difference of each row, relative to its norm."""
    scale: Tensor = torch.linalg.vector_norm(expected, dim=-1).clamp_min(1e-30)
    difference: Tensor = torch.linalg.vector_norm(actual.float() - expected, dim=-1)
    return difference / scale


def row_limits(errors: Tensor, alone: Tensor, dtype: torch.dtype) -> Tensor:
    """The most that each of `errors` may be: WORST times the error of the same rank `alone`, with
    one row in MOVED left out of both."""
    moved = -(-len(errors) // MOVED)
    limits = torch.full_like(errors, float("inf"))
    rank = errors.argsort()[: len(errors) - moved]
    limits[rank] = WORST * alone.sort().values[moved:] + torch.finfo(dtype).eps
    return limits


def _nothing_bounds(alone: Tensor) -> str | None:
    """Why limits by these errors would be met by any result: more than half of the rows may be off
    by all of a row."""
    vague = int((~(WORST * alone < 1)).sum())
    if 2 * vague <= len(alone):
        return None
    return f"{vague} of {len(alone)} rows of requests alone are off by half of a row, or more"


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not (one.numel() and (one.is_floating_point() or one.is_complex())):
        return torch.equal(one, other)
    return bool((one - other).abs().max() <= EQUAL * other.abs().max())


def _alike(one: dict[Any, Tensor], other: dict[Any, Tensor]) -> bool:
    """Whether tensors that both have are equal up to rounding."""
    return all(_equal(one[key], other[key]) for key in one.keys() & other.keys())
