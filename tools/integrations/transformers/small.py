"""Small copies of a model for the proof: its class and flags, narrower, and with fewer layers.

Which numbers of a configuration are widths is seen by building the model without memory: one that
changes the shapes of weights is a width, one that changes no weight is a length (a window, a chunk,
an original number of positions), and one that changes rows of an embedding or buffers is a table.
Nothing is known about families. A copy counts if the model's own forward runs on it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from .configuration import Path, changed, integers, is_token, layer_values, setting

FACTORS = (16, 8, 4, 2, 1)
WIDTH, LENGTH, VOCABULARY = 64, 32, 1024
"""Smaller widths and lengths stay as they are; a larger vocabulary is cut to this."""
GAINS = (1.0, 0.5, 0.25)
CALM = 1e-5
"""The most rounding of a copy that is not built with a smaller gain."""
MOST_WEIGHTS = 400_000_000
SHORTEST = 8
"""The smallest length of a copy that has the lengths in their order, each twice the one before."""


class NoCopy(Exception):
    """No small copy of a model runs; the message is that of the last one."""


def small_configs(model: PreTrainedModel, all_heads: bool = False) -> Iterator[PreTrainedConfig]:
    """The configuration with small lengths as well, if it has any, and that with released lengths;
    with fewer heads, or with all of them.

    Raises NoCopy.
    """
    kind, config = type(model), copy.deepcopy(model.config)
    if config._attn_implementation not in ("eager", "sdpa"):  # what runs on any device
        config._attn_implementation = "eager"
    config = _with_few_layers(kind, config)
    roles = _roles(kind, config)
    config = _narrow(kind, config, roles, model.dtype, all_heads)
    lengths = {path: value for path, value in integers(config) if roles.get(path) == "length"}
    if lengths:
        yield _with_small_lengths(kind, config, lengths)
    yield config


def build(kind: Any, config: PreTrainedConfig, gain: float = 1.0) -> PreTrainedModel:
    """A model with random weights that keep the size of activations; raises what `kind` raises.

    With a smaller `gain` its layers add less to what they are given.
    """
    with no_init_weights():
        model: PreTrainedModel = kind(copy.deepcopy(config))
    generator = torch.Generator().manual_seed(0)
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.1
            weight.normal_(0.0, scale, generator=generator)
            weight += float(weight.dim() == 1 and not name.endswith("bias"))
            weight *= 1.0 if id(weight) in tables else gain
    model.config.use_cache = False
    return model.eval().requires_grad_(False)


def build_calm(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """`build` with the first gain at which layers do not amplify rounding, or with the last."""
    for gain in GAINS:
        model = build(kind, config, gain)
        if rounding(model) <= CALM:
            break
    return model


def rounding(model: PreTrainedModel) -> float:
    """How far a row in float32 is from that in float64, relative to its norm. Leaves the model as
    it was."""
    single, double = copy.deepcopy(model), copy.deepcopy(model).double()
    try:
        exact = _result(double, 40)
    except RuntimeError:  # code that casts to float32
        return 0.0
    difference = (_result(single, 40) - exact).norm(dim=-1)
    return float((difference / exact.norm(dim=-1).clamp_min(1e-30)).max())


def hidden_states(model: PreTrainedModel, **inputs: Any) -> Tensor:
    """The first tensor of floating point that a model returns."""
    with torch.no_grad():
        result = model(**inputs)
    return next(x for x in result.values() if isinstance(x, Tensor) and x.is_floating_point())


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """What tells layers apart: the classes inside and their flags, but no counts and widths."""
    return tuple(
        (name, type(inner), *((key, _flag(value)) for key, value in sorted(vars(inner).items())))
        for name, inner in module.named_modules()
    )


def counterparts(
    names: Sequence[str], kind: Any, source: PreTrainedConfig, target: PreTrainedConfig
) -> tuple[str, ...]:
    """For each layer in `names` of `source` the first of its kind in `target`, another
    configuration of the class, which may number layers otherwise. Raises NoCopy."""
    if not names:
        return ()
    layers, others = _on_meta(kind, source), [*_on_meta(kind, target).named_modules()]

    def counterpart(name: str) -> str:
        layer = layers.get_submodule(name)
        same = {at: each for at, each in others if type(each) is type(layer)}
        like = (at for at, each in same.items() if kind_of(each) == kind_of(layer))
        if (at := next(like, name if name in same else None)) is None:
            raise NoCopy(f"the configuration has no layer like {name} of the copy")
        return at

    return tuple(map(counterpart, names))


def is_stack(name: str, module: nn.Module) -> bool:
    """Whether `module` is a list of layers, and not of parts of a layer."""
    return isinstance(module, nn.ModuleList) and not re.search(r"\.\d", name)


def _flag(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        return value
    return bool(value) if isinstance(value, float) else value is None


def _on_meta(kind: Any, config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"), no_init_weights():
        model: nn.Module = kind(copy.deepcopy(config))
    return model


def _with_few_layers(kind: Any, config: PreTrainedConfig) -> PreTrainedConfig:
    """One layer of each kind, or the first layers up to one of each kind; all of them where the
    class does not allow that."""
    full = _on_meta(kind, config)
    for name, stack in full.named_modules():
        if not is_stack(name, stack) or not isinstance(stack, nn.ModuleList):
            continue
        kinds = [kind_of(layer) for layer in stack]
        firsts = sorted({kinds.index(each) for each in kinds} | {min(1, len(kinds) - 1)})
        for kept in (firsts, [*range(firsts[-1] + 1)]):
            attempts = _shortened(config, len(kinds), kept) if len(kept) < len(kinds) else ()
            shorter = (x for x in attempts if _has_layers(kind, x, name, len(kept), kinds))
            if (short := next(shorter, None)) is not None:
                config = short
                break
    return config


def _shortened(
    config: PreTrainedConfig, total: int, kept: Sequence[int]
) -> Iterator[PreTrainedConfig]:
    """Configurations with the layers `kept` of `total`: what is stated for each, their number, and
    another number that may count the first or the last of them."""
    shorter, layers = copy.deepcopy(config), layer_values(config)
    for key, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == total:
            setattr(shorter, key, [value[i] for i in kept])
    counts = [(path, n) for path, n in integers(config) if 0 < n <= total and not is_token(path)]
    for path in (path for path, n in counts if n == total):
        values = [{path: len(kept)}]
        for other, n in counts:
            parts = {sum(i < n for i in kept), sum(i >= total - n for i in kept)}
            values += [{path: len(kept), other: part} for part in parts if other != path]
        for each in values:
            with suppress(Exception):  # of the class
                attempt = changed(shorter, each)
                if layers:
                    attempt.per_layer_config = {i: layers[n] for i, n in enumerate(kept)}
                yield attempt


def _has_layers(
    kind: Any, config: PreTrainedConfig, stack: str, count: int, kinds: Sequence[Any]
) -> bool:
    try:
        layers = [*_on_meta(kind, config).get_submodule(stack).children()]
    except Exception:  # of the class
        return False
    return len(layers) == count and {kind_of(layer) for layer in layers} == set(kinds)


def _roles(kind: Any, config: PreTrainedConfig) -> dict[Path, str]:
    """What each larger integer is: "width", "length", "table" or "vocabulary"."""
    before = _on_meta(kind, config)
    tables = {id(m.weight): n for n, m in before.named_modules() if isinstance(m, nn.Embedding)}
    embeddings = {f"{name}.weight" for name in tables.values()}
    shapes = _shapes(before)
    buffers = {name for name, _ in before.named_buffers()}
    tokens = {path: value for path, value in integers(config) if is_token(path)}
    roles: dict[Path, str] = {}
    alike: dict[Path, Path] = {}
    for path, value in integers(config):
        if value < LENGTH or is_token(path):
            continue
        first = alike.setdefault((*(k for k in path if isinstance(k, str)), value), path)
        if first in roles:  # items of one list
            roles[path] = roles[first]
            continue
        try:
            inside = {token: 0 for token, n in tokens.items() if n >= value // 2}
            other = _shapes(_on_meta(kind, changed(config, {path: value // 2, **inside})))
        except Exception:
            continue
        if other.keys() != shapes.keys():
            continue
        differing = {name for name in shapes if shapes[name] != other[name]}
        rows = {n for n in differing & embeddings if shapes[n][1:] == other[n][1:]}
        if not differing:
            roles[path] = "length"
        elif differing <= rows | buffers:
            roles[path] = "vocabulary" if "vocab" in str(path[-1]) else "table"
        elif value >= WIDTH:
            roles[path] = "width"
    return roles


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in named}


def _narrow(
    kind: Any,
    config: PreTrainedConfig,
    roles: Mapping[Path, str],
    dtype: torch.dtype,
    all_heads: bool,
) -> PreTrainedConfig:
    """With all widths divided by the largest factor that the class accepts; raises NoCopy."""
    config = _small_vocabulary(config, roles)
    numbers, head_dim = dict(integers(config)), _head_dim(config)
    heads = {path: n for path, n in numbers.items()
             if "head" in str(path[-1]) and "dim" not in str(path[-1]) and n > 0}  # fmt: skip
    roles = {path: role for path, role in roles.items() if "head" not in str(path[-1])}
    most = 1 << max(min(heads.values(), default=1) // 2, 1).bit_length() - 1
    tries = [
        (factor, split, keep)
        for factor, keep in product(FACTORS, (True, False))
        for split in ((1,) if all_heads else dict.fromkeys((min(factor, most), most, 1)))
    ]
    error: Exception | None = None
    for factor, split, keep in tries:
        values = {path: numbers[path] // factor for path, role in roles.items() if role == "width"}
        attempt = changed(config, values | {path: n // split for path, n in heads.items()})
        if keep and head_dim and setting(config, "head_dim") is None:
            attempt.head_dim = head_dim
        try:
            count = sum(p.numel() for p in _on_meta(kind, attempt).parameters())
            if count > MOST_WEIGHTS:
                raise NoCopy(f"a copy has {count} weights")
            _run(build(kind, attempt), 40)
            _run(build(kind, attempt).to(dtype), 40)
        except Exception as failed:
            error = failed
            continue
        return attempt
    raise NoCopy(f"{type(error).__name__}: {error}") from error


def _small_vocabulary(config: PreTrainedConfig, roles: Mapping[Path, str]) -> PreTrainedConfig:
    """Special tokens from the upper half keep their order."""
    sizes = {path: VOCABULARY for path, v in integers(config)
             if roles.get(path) == "vocabulary" and v > VOCABULARY}  # fmt: skip
    if not sizes:
        return config
    ids = {path: value for path, value in integers(config) if is_token(path)}
    large = sorted({value for value in ids.values() if value >= VOCABULARY // 2})
    moved = {path: VOCABULARY // 2 + large.index(v) for path, v in ids.items() if v in large}
    return changed(config, {**sizes, **moved})


def _head_dim(config: Any) -> int | None:
    try:
        return int(config.hidden_size) // int(setting(config, "num_attention_heads"))
    except (AttributeError, TypeError):
        return None


def _with_small_lengths(
    kind: Any, config: PreTrainedConfig, lengths: Mapping[Path, int]
) -> PreTrainedConfig:
    """Each length in the order of all, from SHORTEST on, where the class accepts that."""
    order = sorted(set(lengths.values()))
    small = {p: min(v, SHORTEST << min(order.index(v), 5)) for p, v in lengths.items()}
    for values in [small, *({path: value} for path, value in small.items())]:
        try:
            attempt = changed(config, values)
            _run(build(kind, attempt), 4 * max(values.values()))
        except Exception:
            continue
        config = attempt
        if values is small:
            break
    return config


def reach(config: PreTrainedConfig) -> int:
    """The largest length of a configuration whose lengths are small."""
    return max((value for _, value in integers(config) if value <= SHORTEST << 5), default=0)


def _run(model: PreTrainedModel, tokens: int) -> None:
    if not torch.isfinite(_result(model, tokens)).all():
        raise NoCopy("its own result is not finite")


def _result(model: PreTrainedModel, tokens: int) -> Tensor:
    known: Any = model.get_input_embeddings()
    ids = torch.arange(3, 3 + tokens)[None] % min(known.num_embeddings, 64)
    return hidden_states(model, input_ids=ids)
