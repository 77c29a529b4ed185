"""Route the layers of a transformers model to ops that know requests.

The model runs once on a few tokens with its own attention replaced by the op's: each mask is read
from the function that makes it. Which other layers mix tokens, and run as mixers, is known from the
proof.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

from .... import ForwardContext, forward_context
from ....errors import ModelNotAdaptable, PiecegraphError
from .attention import (
    Mask,
    PackedRequests,
    UnknownAttention,
    UnknownMask,
    attend,
    given,
    mask_of,
    outside_mixers,
)
from .host_reads import check_readers, host_readers
from .mixers import Mixer, UnknownCall
from .small import hidden_states, kind_of

ONE_REQUEST = "Make that layer a splitting op that knows requests, or serve one request per batch"
OWN_OP = "Write its attention as a custom op and list the op in splitting_ops"
FOREIGN = (
    "If that line is of the model or of transformers, correct it or use another version; a model"
    " that runs can be prepared without this adapter, with its attention op in splitting_ops"
)


@dataclass(frozen=True, slots=True)
class Routes:
    """A routed model, `mixers` by name of their layer, and for each attention layer outside of
    mixers the number of key heads and the dimensions of keys and values. `biased` layers add a bias
    for each pair of tokens of the step."""

    model: PreTrainedModel
    mixers: dict[str, Mixer]
    kv_shapes: dict[str, tuple[int, int, int]]
    biased: tuple[str, ...]

    def run(self, requests: list[Tensor], offset: int) -> list[Tensor]:
        """The hidden states of requests packed in this order, as in a step without compiling."""
        lengths = tuple(map(len, requests))
        positions = torch.cat([torch.arange(n, device=self.model.device) for n in lengths])
        context = ForwardContext(self.mixers, PackedRequests(lengths))
        with torch.no_grad(), forward_context(context):
            hidden = run_packed(self.model, torch.cat(requests), positions, offset)
        return list(torch.split(hidden, list(lengths)))


def route(
    model: PreTrainedModel, mixing: Collection[str] = (), by_row: Collection[str] = ()
) -> Routes:
    """Let `model` call the ops; each layer of the kind of one in `mixing` becomes a mixer, and so
    do layers `by_row`, of which each row of the result is that of a row.

    Raises ModelNotAdaptable, UnknownAttention for attention that has to be in a mixer, and
    UnknownCall for a layer that cannot be called for each request.
    """
    inputs, lengths = packed_inputs(model)
    trial = Trial(model, lengths)
    trial.mixers = {n: Mixer(m, n, trial.read) for n, m in _like(model, mixing).items()}
    within = tuple(f"{name}." for name in trial.mixers)
    for name in sorted(each for each in by_row if not f"{each}.".startswith(within)):
        trial.mixers[name] = Mixer(model.get_submodule(name), name, trial.read, by_row=True)
    inner: Any
    for inner in (m for mixer in trial.mixers.values() for m in mixer.module.modules()):
        inner.in_mixer = True
    with trial.attending(), _learning(trial.mixers, lengths), host_readers(model) as readers:
        hidden_states(model, **inputs)
    check_readers(readers, trial.mixers)
    for name, mixer in trial.mixers.items():
        if not mixer.learned:
            raise UnknownCall(f"{name} is called by another name than forward", name)
    trial.install(stand_in=any(mixer.masked for mixer in trial.mixers.values()))
    for mixer in trial.mixers.values():
        mixer.install()
    kv_shapes = {trial.names[module]: form for module, form in trial.kv_shapes.items()}
    return Routes(model, trial.mixers, kv_shapes, tuple(trial.names[m] for m in trial.biased))


def run_packed(
    model: PreTrainedModel,
    input_ids: Tensor | None,
    positions: Tensor,
    offset: int,
    **others: Tensor,
) -> Tensor:
    """The forward over packed tokens: two (T,) int64 tensors to hidden states (T, hidden)."""
    place = positions + offset if offset else positions
    ids = None if input_ids is None else input_ids[None]
    result = model(input_ids=ids, position_ids=place[None], **others)
    hidden: Tensor = result.last_hidden_state
    return hidden[0]


def packed_inputs(model: PreTrainedModel) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Three requests in one row, and their lengths: in sum a number that no layer has as a width.

    Raises ModelNotAdaptable.
    """
    embedding = model.get_input_embeddings()
    if not hasattr(embedding, "num_embeddings"):
        advice = "Prepare it with inputs and splitting ops of your own"
        raise refusal(model, "its input embeddings are no nn.Embedding", advice)
    widths = {n for weight in model.parameters() for n in weight.shape}
    lengths = (3, 5, next(n for n in count(3) if 8 + n not in widths))
    ids = torch.cat([torch.arange(3, 3 + length) for length in lengths])
    positions = torch.cat([torch.arange(length) for length in lengths])
    inputs = {"input_ids": ids % embedding.num_embeddings, "position_ids": positions}
    return {name: x[None].to(model.device) for name, x in inputs.items()}, lengths


def _like(model: PreTrainedModel, names: Collection[str]) -> dict[str, nn.Module]:
    """All modules of the kinds of those in `names`, outermost only."""
    kinds = {kind_of(model.get_submodule(name)) for name in names}
    classes = {kind[0][1] for kind in kinds}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if type(module) in classes and not name.startswith(tuple(f"{n}." for n in found)):
            found |= {name: module} if kind_of(module) in kinds else {}
    return found


def _no_mask(*args: Any, attention_mask: Any = None, **kwargs: Any) -> None:
    """The mask in steps: none, since the op knows it."""
    if attention_mask is not None:
        raise NotImplementedError("an attention_mask: rows of a step are requests without padding")


def _stand_in(*args: Any, **kwargs: Any) -> Tensor:
    """The mask in steps of a model that hands a part of it to a layer, whose op knows it too."""
    return torch.zeros(1, 1, 1, 1)


def _all_seen(*args: Any, **kwargs: Any) -> None:
    """The mask in steps of a model that makes a padding mask itself, which hides nothing."""


def _whole_mask(make: Any, *args: Any, **arguments: Any) -> Any:
    """The mask that `make` would leave out where it hides nothing."""
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return make(*args, **arguments)


@contextmanager
def _learning(mixers: Mapping[str, Mixer], lengths: tuple[int, ...]) -> Iterator[None]:
    before = {mixer: vars(mixer.module).get("forward") for mixer in mixers.values()}
    for mixer in before:
        mixer.module.forward = functools.partial(mixer.learn, lengths)
    try:
        yield
    finally:
        for mixer, forward in before.items():
            if forward is None:
                del mixer.module.forward
            else:
                mixer.module.forward = forward


_CURRENT: ContextVar[Trial] = ContextVar("trial")


@dataclass
class Trial:
    """A run that reads masks. Each row of a batch is a request, or consists of `lengths`."""

    model: PreTrainedModel
    lengths: tuple[int, ...] | None = None
    masks: dict[nn.Module, Mask] = field(default_factory=dict)
    names: dict[nn.Module, str] = field(default_factory=dict)
    kv_shapes: dict[nn.Module, tuple[int, int, int]] = field(default_factory=dict)
    read_masks: dict[int, tuple[Tensor, Mask | UnknownMask]] = field(default_factory=dict)
    """By storage: models hand slices of a mask to their layers."""
    one_row: set[nn.Module] = field(default_factory=set)
    arguments: dict[nn.Module, list[str]] = field(default_factory=dict)
    """Of attention calls, those that the op does without: the proof compares results."""
    biased: set[nn.Module] = field(default_factory=set)
    mixers: dict[str, Mixer] = field(default_factory=dict)
    selectors: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    """Integer results of modules, by identity, with the name of the module."""
    own_mask: bool = False
    """Whether the model makes a padding mask itself; in steps it hides nothing."""

    @contextmanager
    def attending(self) -> Iterator[None]:
        AttentionInterface.register("piecegraph_trial", outside_mixers(_attend_in_trial))
        masks = lambda *args, **arguments: _CURRENT.get().mask(*args, **arguments)  # noqa: E731
        AttentionMaskInterface.register("piecegraph_trial", masks)
        self.names = {module: name for name, module in self.model.named_modules()}
        own = self.model.config._attn_implementation
        token = _CURRENT.set(self)
        hooks = [m.register_forward_hook(self._made_by(name)) for m, name in self.names.items()]
        if self.model._can_set_attn_implementation():
            self.model.set_attn_implementation("piecegraph_trial")
        elif own in ALL_MASK_ATTENTION_FUNCTIONS:  # as in a trace, where no mask is left out
            make = ALL_MASK_ATTENTION_FUNCTIONS[own]
            ALL_MASK_ATTENTION_FUNCTIONS[own] = functools.partial(_whole_mask, make)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            for hook in hooks:
                hook.remove()
            if self.model._can_set_attn_implementation():
                self.model.set_attn_implementation(own)
            elif own in ALL_MASK_ATTENTION_FUNCTIONS:
                del ALL_MASK_ATTENTION_FUNCTIONS[own]  # what traces of other models would read
                if ALL_MASK_ATTENTION_FUNCTIONS.get(own) is not make:
                    ALL_MASK_ATTENTION_FUNCTIONS[own] = make

    def _made_by(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not output.is_floating_point():
                self.selectors.setdefault(id(output), (output, name))

        return hook

    def install(self, stand_in: bool = False) -> None:
        """Route the attention of each module that was seen to the op, with its mask."""
        implementation = "piecegraph"
        make: Any = _no_mask
        if stand_in:
            implementation, make = "piecegraph_stand_in", _stand_in
        elif self.own_mask:
            implementation, make = "piecegraph_own_mask", _all_seen
        AttentionInterface.register(implementation, outside_mixers(attend))
        AttentionMaskInterface.register(implementation, make)
        module: Any
        for module, mask in self.masks.items():
            module.attention_mask_rule, module.layer_name = mask, self.names[module]
            module.one_row, module.mask_stand_in = module in self.one_row, stand_in
            module.other_arguments = self.arguments[module]
        if self.masks or stand_in:
            self.model.set_attn_implementation(implementation)

    def read(self, tensor: Tensor) -> Mask | None:
        """The mask that a tensor is, if it came from a function; raises UnknownCall."""
        _, read = self.read_masks.get(tensor.untyped_storage().data_ptr(), (None, None))
        if isinstance(read, UnknownMask):
            raise UnknownCall(f"has a mask by {read}")
        return read

    def mask(self, mask_function: Any, **arguments: Any) -> Tensor:
        arguments["allow_is_bidirectional_skip"] = False
        self.own_mask |= bool(self.lengths) and arguments.get("attention_mask") is not None
        mask: Tensor = eager_mask(**arguments, mask_function=mask_function)
        read: Mask | UnknownMask
        try:
            read = mask_of(mask_function)
        except UnknownMask as unknown:
            read = unknown
        self.read_masks[mask.untyped_storage().data_ptr()] = mask, read
        return mask

    def mask_for(self, module: nn.Module, mask: Any, is_causal: Any, window: Any) -> Mask:
        """The mask of one call; raises ModelNotAdaptable."""
        if mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            return Mask(bool(causal), window or 0)
        _, read = self.read_masks.get(mask.untyped_storage().data_ptr(), (None, None))
        name = self.names[module]
        if read is None:
            raise UnknownAttention(f"{name} computes with a mask of its own", name)
        if isinstance(read, UnknownMask):
            raise UnknownAttention(f"{name} has a mask by {read}", name)
        return read

    def check_indices(self, name: str, indices: Tensor) -> None:
        """Raise UnknownAttention, with the module that made `indices`, unless that is a mixer."""
        _, maker = self.selectors.get(id(indices), (None, name))
        if maker not in self.mixers:
            raise UnknownAttention(f"{name} calls its attention with indices", maker)


def _attend_in_trial(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """`attend` with what the trial has learned of this call."""
    trial = _CURRENT.get()
    name = trial.names.get(module, type(module).__name__)
    bias, indices = arguments.get("position_bias"), arguments.get("indices")
    if bias is not None and query.shape[0] > 1:
        raise UnknownAttention(f"{name} adds a bias to a batch", name)
    if query.shape[2] != key.shape[2]:
        raise UnknownAttention(f"{name} attends to another sequence than its own", name)
    if indices is not None:
        trial.check_indices(name, indices)
    causal, window = arguments.get("is_causal"), arguments.get("sliding_window")
    mask = trial.mask_for(module, attention_mask, causal, window)
    if trial.masks.setdefault(module, mask) != mask:
        raise refusal(trial.model, f"{name} is called with different masks")
    trial.kv_shapes[module] = key.shape[1], key.shape[3], value.shape[3]
    rows, tokens = query.shape[0], query.shape[2]
    if rows == 1:
        trial.one_row.add(module)
    if bias is not None:
        trial.biased.add(module)
    known = inspect.signature(attend).parameters
    others = given({n: each for n, each in arguments.items() if n not in known})
    trial.arguments[module] = others
    module.attention_mask_rule, module.layer_name, module.one_row = mask, name, rows == 1
    module.mask_stand_in, module.other_arguments = True, others
    with forward_context(ForwardContext({}, PackedRequests(trial.lengths or (tokens,) * rows))):
        return attend(module, query, key, value, attention_mask, **arguments)


def refusal(model: PreTrainedModel, reason: str, advice: str = OWN_OP) -> ModelNotAdaptable:
    """The error for a model that cannot be served, by its class and family."""
    family = f"{type(model).__name__} ({model.config.model_type})"
    return ModelNotAdaptable(family=family, reason=reason, advice=advice)


@contextmanager
def errors_of(model: PreTrainedModel) -> Iterator[None]:
    """What the model, transformers or torch raises inside is ModelNotAdaptable."""
    try:
        yield
    except PiecegraphError:
        raise
    except (UnknownAttention, UnknownCall) as error:
        raise refusal(model, str(error)) from error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        reason = f"{type(error).__name__} at {where.filename}:{where.lineno}: {what}"
        raise refusal(model, reason, FOREIGN) from error
