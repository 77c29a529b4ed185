"""Sizes of the reference decoder, their presets and their form as text."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ...errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder; `max_positions` bounds prompt and generated tokens together.

    `window`: the last tokens that a token sees; 0 for all.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 352
    vocab: int = 1024
    max_positions: int = 16_384
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    window: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def num_weights(self) -> int:
        """Elements of all parameters of the decoder."""
        attention = 2 * self.hidden * (self.hidden + self.kv_heads * self.head_dim)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden


PRESETS = {
    "tiny": DecoderConfig(),
    "small": DecoderConfig(8, 512, 8, 4, 1408, 8192),
    "1b": DecoderConfig(16, 2048, 32, 8, 8192, 128_256, rope_theta=500_000.0),
    "8b": DecoderConfig(32, 4096, 32, 8, 14_336, 128_256, rope_theta=500_000.0),
}
SIZES = [field.name for field in fields(DecoderConfig) if field.type == "int"]


def parse_decoder_config(text: str) -> DecoderConfig:
    """`tiny`, `small,layers=2` or `layers=2,hidden=64`: a preset, sizes that differ from it.

    Raises InvalidSetting for what is not of this form and for sizes that do not fit together.
    """
    first, *rest = text.split(",")
    if first in PRESETS:
        config = PRESETS[first]
    else:
        config, rest = PRESETS["tiny"], [first, *rest]
    config = replace(config, **dict(_size(text, item) for item in rest))
    if config.hidden % config.heads or config.head_dim % 2:
        raise _invalid(text, "hidden / heads, the head's dimension, is not an even number")
    if config.heads % config.kv_heads:
        raise _invalid(text, "heads is not a multiple of kv_heads")
    return config


def _size(text: str, item: str) -> tuple[str, int]:
    name, _, value = (part.strip() for part in item.partition("="))
    if name not in SIZES:
        raise _invalid(text, f"{item!r} is neither a preset nor a size")
    if not (value.isascii() and value.isdigit() and value.strip("0")):
        raise _invalid(text, f"{name} is not a positive number")
    if len(value) > 9:
        raise _invalid(text, f"{name} is too large")
    return name, int(value)


def _invalid(text: str, reason: str) -> InvalidSetting:
    return InvalidSetting(
        name="--model",
        value=text,
        reason=reason,
        expected=f"one of {', '.join(PRESETS)} and NAME=NUMBER with names {', '.join(SIZES)}",
    )
