"""Hugging Face models for steps: `PackedModel` over packed tokens, `adapt` for other inputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .... import AttentionSupport, Config, ForwardContext, forward_context
from ....torch_compat.basics.frames import calling_module
from ....torch_compat.basics.tensors import LightDispatchMode
from .attention import SPLITTING_OP, PackedRequests, rows_of
from .configuration import setting, settle_sets
from .mixers import MIXER_OP
from .proof import WORST, proven
from .rope import settle_rope
from .routing import Trial, errors_of, packed_inputs, refusal, route, run_packed
from .small import hidden_states

INPUTS = {"input_ids": "int64[num_tokens]", "positions": "int64[num_tokens]"}
GROUPED = torch.ops.aten._grouped_mm.default
"""In a trace transformers calls it for bfloat16 alone, else an op that reads on the host how many
rows each expert has."""

SETTINGS = {
    "splitting_ops": (SPLITTING_OP,),
    "inputs": INPUTS,
    "attention": {"support": AttentionSupport.NEVER},
}
"""Settings of a `PackedModel` with `attend_packed`: `Config(**SETTINGS, max_num_tokens=…)`."""

TOLERANCE = 1e-3
LARGEST = 0.25
"""The largest relative difference in 16 bits, also where a proof allows more or there is none."""


class PackedModel(nn.Module):
    """A model over packed tokens: (T,) int64 tensors to the hidden states (T, hidden) of its base
    model. `token_type_ids` is for families that take them, if `inputs` names it.

    Positions are 0, 1, 2… in each request. Layers that mix tokens and do not call
    AttentionInterface become splitting ops too. `settings` are for `Config`, `layers` for
    `prepare`. Rotary frequencies that depend on the length are those of `max_model_len` tokens, by
    default of all that the configuration allows. The proof of the model's class and configuration
    is kept in the cache of `config`. Raises ModelNotAdaptable for a model that would not give a
    request what its own forward gives for it alone.
    """

    def __init__(
        self, model: PreTrainedModel, max_model_len: int | None = None, config: Config | None = None
    ) -> None:
        super().__init__()
        with errors_of(model):
            self._adapt(model, max_model_len, config or Config())

    def _adapt(self, model: Any, max_model_len: int | None, config: Config) -> None:
        _begin(model)
        settle_rope(model, max_model_len)
        inputs, lengths = packed_inputs(model)
        requests = list(torch.split(inputs["input_ids"][0], list(lengths)))
        self.own_head = find_head(model, requests[1][None])
        """`own_head(hidden, input_ids, query_lens)` gives what a model with a head gives for each
        request of a step. None for a base model."""
        model = model if self.own_head is None else model.base_model
        with _Grouped(model) as grouped:
            expected = hidden_states(model, input_ids=requests[1][None])[0]
        self.proof = proven(model, config)
        """What the model needs to be served, such as a token that requests must not contain."""
        routes = route(model, self.proof.mixers, grouped.modules)
        result = routes.run(requests, self.proof.offset)[1]
        _compare(model, result, expected, (1 + WORST) * self.proof.error)
        ops = [(SPLITTING_OP, routes.kv_shapes), (MIXER_OP, routes.mixers)]
        self.model = model
        self.layers = routes.mixers
        """What the ops of mixing layers find in the forward context, by name."""
        self.kv_shapes = routes.kv_shapes
        """Key heads, and dimensions of keys and values, of each attention layer, by name."""
        self.biased = routes.biased
        """The attention layers that add a bias for each pair of tokens of the step."""
        self.settings = {**SETTINGS, "splitting_ops": tuple(op for op, used in ops if used)}
        """Settings of `Config`: the ops of this model, its inputs, what its attention supports."""

    def call_forms(self) -> tuple[dict[str, str | None], ...]:
        """`inputs` of `Config` for a model that is called with ids, or with rows of embeddings.

        Raises ModelNotAdaptable for a model that does more with ids than to look up their rows.
        """
        with errors_of(self.model):
            ids = torch.arange(3, 8, device=self.model.device)
            rows = self.model.get_input_embeddings()(ids)
            context, positions = ForwardContext(self.layers, PackedRequests((5,))), ids - 3
            with torch.no_grad(), forward_context(context):
                by_ids = self(ids, positions)
                _compare(self.model, self(None, positions, inputs_embeds=rows), by_ids)
        embeds = f"{str(rows.dtype).removeprefix('torch.')}[num_tokens, {rows.shape[1]}]"
        return {**INPUTS}, {**INPUTS, "input_ids": None, "inputs_embeds": embeds}

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        given = {"token_type_ids": token_type_ids, "inputs_embeds": inputs_embeds}
        others = {name: each[None] for name, each in given.items() if each is not None}
        return run_packed(self.model, input_ids, positions, self.proof.offset, **others)


class _Grouped(LightDispatchMode):
    """The modules that group rows by expert in a way that no trace has."""

    sees_inside = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = set[str]()
        self._names = {id(module): name for name, module in model.named_modules()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GROUPED and args[1].dtype is not torch.bfloat16:
            self.modules.add(calling_module(self._names))
        return func(*args, **(kwargs or {}))


def adapt(model: PreTrainedModel, example: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """Route the attention of `model` through the op, in inference; returns `model` itself.

    `example` are the arguments of one call, by default a few tokens or a picture. Raises
    ModelNotAdaptable where the op would not compute what the model's own attention does.
    """
    with errors_of(model):
        return _routed(model, example)


def _routed(model: PreTrainedModel, example: Mapping[str, Tensor] | None) -> PreTrainedModel:
    _begin(model)
    if not model._can_set_attn_implementation():
        raise refusal(model, "its attention does not go through AttentionInterface")
    inputs = dict(example or _example(model))
    expected = hidden_states(model, **inputs)
    trial = Trial(model)
    with trial.attending():
        actual = hidden_states(model, **inputs)
    if not trial.masks:
        raise refusal(model, "none of its layers calls AttentionInterface")
    _compare(model, actual, expected)
    trial.install()
    return model


def _begin(model: PreTrainedModel) -> None:
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        advice = "Adapt its encoder: model.get_encoder()"
        raise refusal(model, "its decoder attends to another sequence", advice)
    if str(model.config._attn_implementation).startswith("piecegraph"):
        raise refusal(model, "its attention goes through the op already", "Adapt a new model")
    model.eval().requires_grad_(False)
    model.config.use_cache = False
    settle_sets(model)


def _example(model: PreTrainedModel) -> dict[str, Tensor]:
    """Arguments of one call, by the name of the main input."""
    name, config = model.main_input_name, model.config
    if name == "input_ids":
        return {name: torch.arange(3, 8, device=model.device)[None]}
    if name == "pixel_values":
        sides = config.image_size
        height, width = (sides, sides) if isinstance(sides, int) else sides
        shape = (2, setting(config, "num_channels", 3), height, width)
        return {name: torch.rand(shape, device=model.device, dtype=model.dtype)}
    raise refusal(model, f"its main input is {name}", "Pass adapt the arguments of one call")


def _compare(
    model: PreTrainedModel, actual: Tensor, expected: Tensor, rounding: float = LARGEST
) -> None:
    """Raise ModelNotAdaptable if two results of the model itself differ by more than rounding, in
    16 bits by `rounding`."""
    limit = TOLERANCE if expected.dtype == torch.float32 else min(rounding or LARGEST, LARGEST)
    difference = float((actual - expected).float().norm() / expected.float().norm())
    if not difference <= limit:
        reason = f"a request beside others has another result than alone, by {difference:.1e}"
        if actual.shape != expected.shape or not torch.isfinite(actual).all():
            reason = "its result through the op is not finite"
        raise refusal(model, reason)


class Head:
    """What `model` does with the hidden states of its base model, such as pooling and scoring:
    its forward without the base model, whose class of results is `output`.

    It takes the rows of one request, so it runs for each request, outside of steps.
    """

    def __init__(self, model: PreTrainedModel, output: type) -> None:
        self._base = _Computed(model.base_model, output)
        shared: dict[int, Any] = {id(weight): weight for weight in model.parameters()}
        self._model = copy.deepcopy(model, {**shared, id(model.base_model): self._base})

    def __call__(self, hidden: Tensor, input_ids: Tensor, query_lens: Sequence[int]) -> list[Any]:
        """The model's result for each request of a step, from hidden states (T, hidden) and ids
        (T,)."""
        results = []
        for rows in rows_of(query_lens):
            self._base.hidden = hidden[rows]
            with torch.no_grad():
                results.append(self._model(input_ids=input_ids[None, rows]))
        return results


def find_head(model: PreTrainedModel, ids: Tensor) -> Head | None:
    """The head of `model`, or None if its result is the hidden states; `ids` (1, T) are a request.

    Raises ModelNotAdaptable for a model whose result is not that of its head.
    """
    with torch.no_grad():
        expected, base = model(input_ids=ids), model.base_model
        if "last_hidden_state" in expected:
            return None
        below = base(input_ids=ids)
        head = Head(model, type(below))
        try:
            (actual,) = head(below.last_hidden_state[0], ids[0], (ids.shape[1],))
        except Exception:  # code of the model, in a form that it was not written for
            actual = None
    if actual is None or not torch.allclose(actual[0], expected[0], rtol=1e-3, atol=1e-5):
        advice = "Adapt the base model, model.base_model, and run the head for each request"
        reason = "its head takes more of the base model than hidden states"
        raise refusal(model, reason, advice)
    return head


class _Computed(nn.Module):
    """Stands for a base model whose hidden states are known."""

    hidden: Tensor

    def __init__(self, base: Any, output: type) -> None:
        super().__init__()
        self._pooler, self._output = getattr(base, "pooler", None), output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.hidden[None]
        pooled = {} if self._pooler is None else {"pooler_output": self._pooler(hidden)}
        return self._output(last_hidden_state=hidden, **pooled)
