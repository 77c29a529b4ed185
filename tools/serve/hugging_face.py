"""Models of transformers for `piecegraph run --hf`: their configuration, form and verification."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ...errors import InvalidSetting
from ..engine.scheduler import Request
from ..integrations.transformers import SPLITTING_OP, PackedModel, settle_rope
from ..integrations.transformers.configuration import setting

UNBOUNDED = 2**20
"""Positions of a model that has no limit of its own."""
TIE = 1e-4
"""Scores that differ by less, relative to the largest, are equal up to rounding."""


@dataclass(frozen=True, slots=True)
class HfConfig:
    """A configuration of transformers; `text` is how the user gave it. Requests have at most
    `max_model_len` tokens, by default as many as the model has positions. `weights` are arguments
    of `from_pretrained`; None draws random weights."""

    text: str
    config: Any
    max_model_len: int | None = None
    weights: dict[str, Any] | None = None

    @property
    def vocab(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        own = setting(self.config, "max_position_embeddings")
        return self.max_model_len or own or UNBOUNDED

    @property
    def num_weights(self) -> int:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(self.config)
        return sum(parameter.numel() for parameter in model.parameters())

    def tokenizer(self) -> Any:
        """The tokenizer that is beside the weights."""
        return transformers.AutoTokenizer.from_pretrained(**self.weights or {})

    def causal_model(self, seed: int, dtype: torch.dtype, device: torch.device) -> Any:
        """The model with its own attention, and the rotary frequencies of `max_model_len`: with its
        weights, or with random ones, which are the same for the same seed."""
        causal = self._drawn(seed) if self.weights is None else self._loaded(dtype)
        settle_rope(causal, self.max_model_len)
        return causal.eval().requires_grad_(False).to(dtype).to(device)

    def _drawn(self, seed: int) -> Any:
        torch.manual_seed(seed)
        causal = transformers.AutoModelForCausalLM.from_config(
            self.config, attn_implementation="eager"
        )
        with torch.no_grad():  # activations keep their size through a linear map
            for parameter in causal.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        return causal

    def _loaded(self, dtype: torch.dtype) -> Any:
        """Raises InvalidSetting for weights that are not those of the configuration."""
        try:
            causal, loading = transformers.AutoModelForCausalLM.from_pretrained(
                **self.weights or {},
                config=self.config,
                dtype=dtype,
                attn_implementation="eager",
                output_loading_info=True,
            )
        except Exception as error:  # of transformers and of what reads its files
            raise _invalid("--hf", self.text, error) from error
        if missing := sorted(loading["missing_keys"]):
            reason = ValueError(f"its weights have no {missing[0]} and {len(missing) - 1} others")
            raise _invalid("--hf", self.text, reason)
        return causal


class HfDecoder(PackedModel):
    """A causal model of transformers, as the engine runs a decoder."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.base_model)
        self.head = model.get_output_embeddings()
        self.decodes_in_graphs = self.settings["splitting_ops"] == (SPLITTING_OP,)
        """Whether decode steps can be FULL graphs: nothing but paged attention splits them."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary for the given rows."""
        return self.head(hidden)  # type: ignore[no-any-return]


def parse_hf_config(name: str, text: str) -> HfConfig:
    """`LlamaConfig,num_hidden_layers=2`, `folder/config.json`, `folder` or `model.gguf`: a class of
    transformers or a file, or a model with its weights; then settings that differ from it, and
    `max_model_len`. Raises InvalidSetting."""
    source, *rest = re.split(r",(?=\w+=)", text)
    try:
        texts = dict(item.split("=", 1) for item in rest)
        settings = {setting: _value(value) for setting, value in texts.items()}
        max_model_len = settings.pop("max_model_len", None)
        weights = _weights(Path(source))
        if Path(source).exists():
            place = weights or {"pretrained_model_name_or_path": source}
            config = transformers.AutoConfig.from_pretrained(**place, **settings)
        else:
            kind = getattr(transformers, source)
            if not issubclass(kind, transformers.PreTrainedConfig):
                raise TypeError(f"{source} is no configuration")
            config = kind(**settings)
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError("transformers has no causal model for it")
        if not hasattr(config, "vocab_size"):
            raise ValueError("it has no vocab_size; take the configuration of its text model")
    except Exception as error:
        raise _invalid(name, text, error) from error
    return HfConfig(text, config, max_model_len, weights)


def _weights(source: Path) -> dict[str, Any] | None:
    """Where `from_pretrained` finds the model that a folder or a GGUF file has; None for other
    files and for what is no file."""
    files = [source] if source.suffix == ".gguf" else sorted(source.glob("*.gguf"))
    if files:
        return {"pretrained_model_name_or_path": files[0].parent, "gguf_file": files[0].name}
    return {"pretrained_model_name_or_path": source} if source.is_dir() else None


def _invalid(name: str, text: str, error: Exception) -> InvalidSetting:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    expected = (
        "a folder with a model or its config.json, a GGUF file, or a class such as LlamaConfig,"
        " with NAME=VALUE after commas"
    )
    return InvalidSetting(name=name, value=text, reason=reason, expected=expected)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class Generated:
    """How served tokens compare with the model's own `generate`."""

    requests: int
    tokens: int
    difference: str | None


def compare_with_generate(model: Any, requests: Sequence[Request]) -> Generated:
    """Serve each request alone with greedy `generate` of transformers. A token that differs is a
    difference unless its score is that of the other one up to rounding."""
    tokens = 0
    for request in requests:
        prompt = torch.tensor([request.tokens[: request.num_prompt]], device=model.device)
        own = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.num_generate,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()
        served = request.tokens
        tokens += len(own) - request.num_prompt
        pairs = enumerate(zip(own, served, strict=True))
        at = next((i for i, (one, other) in pairs if one != other), None)
        if at is not None:
            with torch.no_grad():
                scores = model(torch.tensor([own[:at]], device=model.device)).logits[0, -1]
            gap = float((scores[own[at]] - scores[served[at]]).abs() / scores.abs().max())
            if gap > TIE:
                place = f"token {at - request.num_prompt} of request {request.id}"
                what = (
                    f"{place} is {served[at]}, generate has {own[at]} (scores differ by {gap:.1e})"
                )
                return Generated(len(requests), tokens, what)
    return Generated(len(requests), tokens, None)
