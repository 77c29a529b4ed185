"""The reference decoder: the Llama family in plain torch.

Embedding, layers of RMSNorm, grouped-query attention with rotary embedding and SwiGLU, a final
norm. The forward is dynamic in the number of tokens and has no branch on it; layers differ
only in the name they pass to the attention op.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from . import attention as _registers_the_op  # noqa: F401
from .decoder_config import DecoderConfig
from .lora import Linear, LoraIndex, LoraLinear

INPUTS = {"input_ids": "int64[num_tokens]", "positions": "int64[num_tokens]"}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer_name: str, max_loras: int) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.num_heads = config.heads
        self.num_kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        kv_size = config.kv_heads * config.head_dim
        self.q_proj = LoraLinear(config.hidden, config.hidden, adapters=max_loras)
        self.k_proj = Linear(config.hidden, kv_size)
        self.v_proj = Linear(config.hidden, kv_size)
        self.o_proj = LoraLinear(config.hidden, config.hidden, adapters=max_loras)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lora: LoraIndex | None
    ) -> torch.Tensor:
        query = self.q_proj(x, lora).view(-1, self.num_heads, self.head_dim)
        key = self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        value = self.v_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        output = torch.empty_like(query)
        torch.ops.piecegraph_reference.paged_attention(query, key, value, output, self.layer_name)
        return self.o_proj(output.flatten(1), lora)  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.intermediate)
        self.up_proj = Linear(config.hidden, config.intermediate)
        self.down_proj = Linear(config.intermediate, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer_name: str, max_loras: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config, layer_name, max_loras)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lora: LoraIndex | None
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, lora)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A decoder with random weights: the same seed gives the same weights on every device.

    With `max_loras` it has that many LoRA adapters.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: DecoderConfig, *, seed: int, max_loras: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer_names = [f"layers.{i}.attention" for i in range(config.layers)]
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(
            DecoderLayer(config, name, max_loras) for name in self.layer_names
        )
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = Linear(config.hidden, config.vocab)
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._draw_weights(seed)
        self.requires_grad_(False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        lora_rows: torch.Tensor | None = None,
        lora_adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`input_ids` and `positions`: (T,) int64. Returns hidden states (T, hidden_size).

        With LoRA also each row's place in `lora_adapters`, or -1, and the active adapters.
        """
        lora = None
        if lora_rows is not None and lora_adapters is not None:
            lora = lora_rows, lora_adapters
        x = self.embedding(input_ids)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for layer in self.layers:
            x = layer(x, cos, sin, lora)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary for the given rows: (rows, hidden) to (rows, vocab)."""
        return self.head(hidden)  # type: ignore[no-any-return]

    def _draw_weights(self, seed: int) -> None:
        """Normal weights, scaled so that activations keep their size through a linear map."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for dims in (2, 3):  # the weights of adapters last: without them the others are equal
                for parameter in self.parameters():
                    if parameter.dim() == dims:
                        parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)


class ImageDecoder(nn.Module):
    """A decoder with two call forms: a step may have rows of images, which are added to those of
    their tokens."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        image_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        own = self.decoder
        x = own.embedding(input_ids)
        if image_rows is not None:
            x = x + image_rows
        cos, sin = own.cos[positions][:, None], own.sin[positions][:, None]
        for layer in own.layers:
            x = layer(x, cos, sin, None)
        return own.norm(x)  # type: ignore[no-any-return]

    def call_forms(self) -> tuple[dict[str, str], ...]:
        weight = self.decoder.embedding.weight
        dtype = str(weight.dtype).removeprefix("torch.")
        return INPUTS, {**INPUTS, "image_rows": f"{dtype}[num_tokens, {weight.shape[1]}]"}


def rotary_table(config: DecoderConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (max_positions, head_dim / 2) of rotary position embedding (Su et al.)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    angles = torch.arange(config.max_positions, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its position's angle; `x`: (T, heads, dim)."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
