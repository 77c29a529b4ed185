"""Route the attention of a transformers model to the op, after a look at what it computes.

The model runs on a few tokens, once with its own attention and once with the op's. In that run each
mask is read from the function that makes it. The neighbors of one request are filled with NaN: NaN
in its own rows means that a layer other than attention mixes requests.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

from .... import AttentionSupport
from ....errors import ModelNotAdaptable
from .attention import (
    SPLITTING_OP,
    Mask,
    PackedRequests,
    Rule,
    UnknownAttention,
    UnknownMask,
    attend,
    attend_packed,
    mask_of,
    outside_mixers,
    packed,
    unknown_argument,
)
from .heads import find_head
from .mixers import MIXER_OP, Mixer, UnknownCall
from .rope import settle_rope
from .sparsity import settle_sparsity

INPUTS = {"input_ids": "int64[num_tokens]", "positions": "int64[num_tokens]"}
SETTINGS = {
    "splitting_ops": (SPLITTING_OP,),
    "inputs": INPUTS,
    "attention": {"support": AttentionSupport.NEVER},
}
"""Settings of a `PackedModel` with `attend_packed`: `Config(**SETTINGS, max_num_tokens=…)`."""

LENGTHS = (3, 5, 3)
"""Tokens of the requests of a trial run; together a number that no layer has as its width."""
TOKENS, MIDDLE = sum(LENGTHS), slice(3, 8)
ONE_REQUEST = "Make that layer a splitting op that knows requests, or serve one request per batch"
OWN_OP = "Write its attention as a custom op and list the op in splitting_ops"
TOLERANCE = {torch.float16: 5e-2, torch.bfloat16: 5e-2}


class PackedModel(nn.Module):
    """A model over packed tokens: (T,) int64 tensors to the hidden states (T, hidden) of its base
    model. `token_type_ids` is for families that take them, if `inputs` names it.

    Layers that mix tokens and do not call AttentionInterface become splitting ops too. `settings`
    are for `Config`, `layers` for `prepare`. Rotary frequencies that depend on the length are those
    of `max_model_len` tokens, by default of all that the configuration allows. Raises
    ModelNotAdaptable for a model in which requests would still see each other.
    """

    def __init__(self, model: PreTrainedModel, max_model_len: int | None = None) -> None:
        super().__init__()
        _begin(model)
        settle_rope(model, max_model_len)
        settle_sparsity(model)
        ids = _packed_inputs(model)["input_ids"][:, MIDDLE]
        self.own_head = find_head(model, ids)
        """`own_head(hidden, input_ids, query_lens)` gives what a model with a head gives for each
        request of a step. None for a base model."""
        model = model if self.own_head is None else model.base_model
        inputs = _packed_inputs(model)
        alone = {name: x[:, MIDDLE] for name, x in inputs.items()}
        expected = _result(model, alone)
        trial = _Trial(model, LENGTHS)
        with trial.attending():
            mixers = _find_mixers(model, inputs, trial)
            with _learning(mixers):
                together = _result(model, inputs)
                pad = getattr(model.config, "pad_token_id", None)
                if trial.own_mask and pad is not None:  # a mask of the ids would hide this one
                    ids = torch.full_like(inputs["input_ids"], pad)
                    _result(model, {**inputs, "input_ids": ids})
        _compare(model, together[:, MIDDLE], expected)
        trial.install(stand_in=any(mixer.masked for mixer in mixers.values()))
        for mixer in mixers.values():
            mixer.install()
        ops = [(SPLITTING_OP, trial.masks), (MIXER_OP, mixers)]
        self.model = model
        self.layers = mixers
        """What the ops of mixing layers find in the forward context, by name."""
        self.kv_shapes = {trial.names[each]: form for each, form in trial.kv_shapes.items()}
        """Key heads, and dimensions of keys and values, of each attention layer, by name."""
        self.biased = tuple(trial.names[each] for each in trial.biased)
        """The attention layers that add a bias for each pair of tokens of the step."""
        self.settings = {**SETTINGS, "splitting_ops": tuple(op for op, used in ops if used)}
        """Settings of `Config`: the ops of this model, its inputs, what its attention supports."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids[None]}
        result = self.model(input_ids=input_ids[None], position_ids=positions[None], **types)
        hidden: Tensor = result.last_hidden_state
        return hidden[0]


def adapt(model: PreTrainedModel, example: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """Route the attention of `model` through the op, in inference; returns `model` itself.

    `example` are the arguments of one call, by default a few tokens or a picture. Raises
    ModelNotAdaptable where the op would not compute what the model's own attention does.
    """
    _begin(model)
    if not model._can_set_attn_implementation():
        raise _refusal(model, "its attention does not go through AttentionInterface")
    inputs = dict(example or _example(model))
    expected = _result(model, inputs)
    trial = _Trial(model)
    with trial.attending():
        actual = _result(model, inputs)
    if not trial.masks:
        raise _refusal(model, "none of its layers calls AttentionInterface")
    _compare(model, actual, expected)
    trial.install()
    return model


def _begin(model: PreTrainedModel) -> None:
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        advice = "Adapt its encoder: model.get_encoder()"
        raise _refusal(model, "its decoder attends to another sequence", advice)
    model.eval().requires_grad_(False)
    model.config.use_cache = False


def _no_mask(*args: Any, attention_mask: Any = None, **kwargs: Any) -> None:
    """The mask in steps: none, since the op knows it."""
    if attention_mask is not None:
        raise NotImplementedError("an attention_mask: rows of a step are requests without padding")


def _stand_in(
    *args: Any, inputs_embeds: Any = None, attention_mask: Any = None, **kwargs: Any
) -> Tensor:
    """The mask in steps of a model that hands a part of it to a layer, whose op knows it too."""
    _no_mask(attention_mask=attention_mask)
    return torch.zeros(1, 1, 1, 1)


def _all_seen(*args: Any, **kwargs: Any) -> None:
    """The mask in steps of a model that makes a padding mask itself, which hides nothing."""


def _whole_mask(make: Any, *args: Any, **arguments: Any) -> Any:
    """The mask that `make` would leave out where it hides nothing."""
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return make(*args, **arguments)


def _packed_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Three requests in one row; the one in the middle has numbers of its own."""
    embedding = model.get_input_embeddings()
    if not hasattr(embedding, "num_embeddings"):
        advice = "Prepare it with inputs and splitting ops of your own"
        raise _refusal(model, "its input embeddings are no nn.Embedding", advice)
    ids = torch.cat([torch.arange(3, 3 + length) for length in LENGTHS])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    inputs = {"input_ids": ids % embedding.num_embeddings, "position_ids": positions}
    return {name: x[None].to(model.device) for name, x in inputs.items()}


def _find_mixers(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], trial: _Trial
) -> dict[str, Mixer]:
    """The layers that let the request in the middle see the others, as mixers. Where one cannot be
    called for each request, the module around it is. Raises UnknownCall, ModelNotAdaptable."""
    mixers: dict[str, Mixer] = {}
    while True:
        unknown: Exception | None = None
        try:
            name = _mixing_module(model, inputs, mixers, trial)
        except UnknownCall as error:
            unknown, name = error, error.layer.rpartition(".")[0]
        except UnknownAttention as error:
            unknown, name = error, error.layer
        if name is None:
            return mixers
        if name in mixers:  # what it is given for one request comes from others
            name = name.rpartition(".")[0]
        callable_ = name and not isinstance(model.get_submodule(name), nn.ModuleList)
        more = _mixers_like(model, name, trial) if callable_ and name not in mixers else None
        if more is None and unknown is not None:
            raise unknown
        if more is None:
            kind = type(model.get_submodule(name)).__name__
            reason = f"{name} ({kind}) mixes the tokens of packed requests"
            raise _refusal(model, reason, ONE_REQUEST)
        outer = tuple(f"{each}." for each in more)
        mixers = {n: m for n, m in mixers.items() if not n.startswith(outer)} | more


def _mixing_module(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], mixers: Mapping[str, Mixer], trial: _Trial
) -> str | None:
    """The first module that lets the request in the middle see the others; None if none does.

    Raises UnknownAttention for attention that the op cannot compute, with the module that has to be
    a mixer.
    """
    mixing: list[str] = []
    selectors: dict[int, tuple[Tensor, str, bool]] = {}
    trial.selectors = selectors
    embedding: nn.Module = model.get_input_embeddings()

    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        spoiled = torch.full_like(output, float("nan"))
        spoiled[:, MIDDLE] = output[:, MIDDLE]
        return spoiled

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not output.is_floating_point():
                selectors.setdefault(id(output), (output, name, name in mixers))
            if not mixing and not _spoiled([*args, *kwargs.values()]) and _spoiled([output]):
                mixing.append(name)

        return hook

    hooks = [embedding.register_forward_hook(spoil)]
    inside = tuple(f"{name}." for name in mixers)
    for name, module in model.named_modules():
        if name and module is not embedding and not name.startswith(inside):
            hooks.append(module.register_forward_hook(look(name), with_kwargs=True))
    try:
        with _learning(mixers):
            result = _result(model, inputs)
    except UnknownAttention:
        if not mixing:
            raise
        return mixing[0]
    finally:
        trial.selectors = None
        for hook in hooks:
            hook.remove()
    if not mixing and _spoiled([result]):
        raise _refusal(model, "its forward mixes the tokens of packed requests", ONE_REQUEST)
    return mixing[0] if mixing else None


def _spoiled(values: Any) -> bool:
    """Whether rows of the request in the middle are not a number in a tensor of `values`."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, Tensor):
        if not values.is_floating_point() or TOKENS not in values.shape:
            return False
        rows = values.movedim(values.shape.index(TOKENS), 0)[MIDDLE]
        return bool(rows.isnan().any())
    return isinstance(values, (tuple, list)) and any(map(_spoiled, values))


def _mixers_like(model: PreTrainedModel, name: str, trial: _Trial) -> dict[str, Mixer] | None:
    """A mixer for the module called `name`, and for all others of its class. Attention in one is
    the model's own. None if one is more than a layer: several attentions are in it."""
    kind = type(model.get_submodule(name))
    alike = {n: m for n, m in model.named_modules() if type(m) is kind}
    inner = {each for module in alike.values() for each in module.modules()}
    if any(sum(each in trial.masks for each in m.modules()) > 1 for m in alike.values()):
        return None
    each: Any
    for each in inner:
        each.in_mixer = True
        trial.masks.pop(each, None)
        trial.kv_shapes.pop(each, None)
    return {n: Mixer(m, n, trial.read) for n, m in alike.items()}


@contextmanager
def _learning(mixers: Mapping[str, Mixer]) -> Iterator[None]:
    before = {mixer: vars(mixer.module).get("forward") for mixer in mixers.values()}
    for mixer in before:
        mixer.module.forward = functools.partial(mixer.learn, LENGTHS)
    try:
        yield
    finally:
        for mixer, forward in before.items():
            if forward is None:
                del mixer.module.forward
            else:
                mixer.module.forward = forward


_CURRENT: ContextVar[_Trial] = ContextVar("trial")


@dataclass
class _Trial:
    """A run that reads masks. Each row of a batch is a request, or consists of `lengths`."""

    model: PreTrainedModel
    lengths: tuple[int, ...] | None = None
    masks: dict[nn.Module, Mask] = field(default_factory=dict)
    names: dict[nn.Module, str] = field(default_factory=dict)
    kv_shapes: dict[nn.Module, tuple[int, int, int]] = field(default_factory=dict)
    read_masks: dict[int, tuple[Tensor, Mask | UnknownMask]] = field(default_factory=dict)
    """By storage: models hand slices of a mask to their layers."""
    one_row: set[nn.Module] = field(default_factory=set)
    biased: set[nn.Module] = field(default_factory=set)
    selectors: dict[int, tuple[Tensor, str, bool]] | None = None
    """Integer results of modules, by identity, with the module and whether it is a mixer."""
    own_mask: bool = False
    """Whether the model makes a padding mask itself; it hides nothing."""

    @contextmanager
    def attending(self) -> Iterator[None]:
        AttentionInterface.register("piecegraph_trial", outside_mixers(_attend_in_trial))
        masks = lambda *args, **arguments: _CURRENT.get().mask(*args, **arguments)  # noqa: E731
        AttentionMaskInterface.register("piecegraph_trial", masks)
        self.names = {module: name for name, module in self.model.named_modules()}
        own = self.model.config._attn_implementation
        token = _CURRENT.set(self)
        if self.model._can_set_attn_implementation():
            self.model.set_attn_implementation("piecegraph_trial")
        elif own in ALL_MASK_ATTENTION_FUNCTIONS:  # as in a trace, where no mask is left out
            make = ALL_MASK_ATTENTION_FUNCTIONS[own]
            ALL_MASK_ATTENTION_FUNCTIONS[own] = functools.partial(_whole_mask, make)
        try:
            yield
        except UnknownCall as error:
            raise _refusal(self.model, str(error), ONE_REQUEST) from error
        except UnknownAttention as error:
            raise _refusal(self.model, str(error)) from error
        finally:
            _CURRENT.reset(token)
            if self.model._can_set_attn_implementation():
                self.model.set_attn_implementation(own)
            elif own in ALL_MASK_ATTENTION_FUNCTIONS:
                ALL_MASK_ATTENTION_FUNCTIONS[own] = make

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
        if self.lengths and (own := arguments.get("attention_mask")) is not None:
            self.own_mask = True
            if not own.all():
                raise _refusal(self.model, "it hides tokens by their values")
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
        reason = f"{name} calls its attention with indices"
        if self.lengths is None:
            raise UnknownAttention(reason, name)
        if self.selectors is not None:
            _, maker, is_mixer = self.selectors.get(id(indices), (None, name, False))
            if not is_mixer:
                raise UnknownAttention(reason, maker)


def _attend_in_trial(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As `attend`, without the op."""
    trial = _CURRENT.get()
    name = trial.names.get(module, type(module).__name__)
    if position_bias is not None and query.shape[0] > 1:
        others["position_bias"] = position_bias
    if (argument := unknown_argument(others)) is not None:
        raise UnknownAttention(f"{name} calls its attention with {argument}", name)
    if query.shape[2] != key.shape[2]:
        raise UnknownAttention(f"{name} attends to another sequence than its own", name)
    if indices is not None:
        trial.check_indices(name, indices)
    mask = trial.mask_for(module, attention_mask, is_causal, sliding_window)
    if trial.masks.setdefault(module, mask) != mask:
        raise _refusal(trial.model, f"{name} is called with different masks")
    trial.kv_shapes[module] = key.shape[1], key.shape[3], value.shape[3]
    rows, tokens = query.shape[0], query.shape[2]
    q, k, v, output = packed(query, key, value, rows == 1)
    if rows == 1:
        trial.one_row.add(module)
    if position_bias is not None:
        trial.biased.add(module)
    bias, selected = (x if x is None else x[0] for x in (position_bias, indices))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    rule = Rule(scale, mask.causal, mask.window, softcap or 0.0, mask.chunk, s_aux, bias, selected)
    attend_packed(q, k, v, output, rule, PackedRequests(trial.lengths or (tokens,) * rows))
    return output.view(rows, tokens, *output.shape[1:]), None


def _example(model: PreTrainedModel) -> dict[str, Tensor]:
    """Arguments of one call, by the name of the main input."""
    name, config = model.main_input_name, model.config
    if name == "input_ids":
        return {name: torch.arange(3, 8, device=model.device)[None]}
    if name == "pixel_values":
        sides = config.image_size
        height, width = (sides, sides) if isinstance(sides, int) else sides
        shape = (2, getattr(config, "num_channels", 3), height, width)
        return {name: torch.rand(shape, device=model.device, dtype=model.dtype)}
    raise _refusal(model, f"its main input is {name}", "Pass adapt the arguments of one call")


def _result(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        result = model(**inputs)
    return next(x for x in result.values() if isinstance(x, Tensor) and x.is_floating_point())


def _compare(model: PreTrainedModel, actual: Tensor, expected: Tensor) -> None:
    """Raise ModelNotAdaptable if two results differ by more than rounding."""
    difference = float((actual - expected).float().norm() / expected.float().norm())
    if not difference <= TOLERANCE.get(expected.dtype, 1e-3):
        reason = f"a request beside others has another result than alone, by {difference:.1e}"
        if actual.shape != expected.shape or not torch.isfinite(actual).all():
            reason = "its result through the op is not finite"
        raise _refusal(model, f"{reason} (positions that are not position_ids do that)")


def _refusal(model: PreTrainedModel, reason: str, advice: str = OWN_OP) -> ModelNotAdaptable:
    family = f"{type(model).__name__} ({model.config.model_type})"
    return ModelNotAdaptable(family=family, reason=reason, advice=advice)
