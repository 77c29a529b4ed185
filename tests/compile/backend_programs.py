"""Programs for `torch.compile(backend="piecegraph")`, in the style of torch's own reproductions.

Each gives a function and the arguments of its calls. `python -m tests.compile.backend_programs
CACHE [NAME...]` runs them in one process and prints a line of JSON for each. What fails is run with
Inductor alone: a program that runs there must run here.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import json
import math
import sys
import warnings
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

R = torch.randn


def rows(*sizes, width=8):
    return [(R(size, width),) for size in sizes]


def pairs(*sizes):
    return [(R(size, 8), R(size, 8)) for size in sizes]


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Output:
    hidden: Tensor
    parts: list[Tensor]


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("sum", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        self.sum += x.mean(0)
        return x * self.sum + self.calls


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys = []

    def forward(self, x):
        self.keys.append(x)
        return torch.cat(self.keys).sum(0)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def seeded(module):
    torch.manual_seed(1)
    for weight in module.parameters():
        if weight.is_floating_point():
            nn.init.normal_(weight, std=0.2)
    return module.eval()


# Arithmetic, Python, containers.


def dictionary(d):
    return {key: value * len(d) for key, value in d.items()} | {"sum": d["a"] + d["b"]}


def named_tuple(p):
    return Point(p.x + p.y, p.x - p.y)


def data_class(x):
    made = Output(x * 2, [x, x + 1])
    return made.hidden + sum(made.parts)


def closure(x):
    scale = 3

    def inner(y):
        nonlocal scale
        scale += 1
        return y * scale

    return inner(x) + inner(x)


def generator(x):
    return sum(part * i for i, part in enumerate(x.unbind(1)))


def exception(x):
    try:
        raise KeyError("k")
    except KeyError:
        return x.cos()


def early_return(x, flag):
    if flag:
        return x + 1
    return x - 1


def keyword(x, *, scale=1.0, **rest):
    return x * scale + sum(rest.values())


def while_loop_in_python(x):
    i = 0
    while i < x.size(0) % 3 + 1:
        x = x + i
        i += 1
    return x


def string_key(x, mode):
    return {"sin": torch.sin, "cos": torch.cos}[mode](x)


def partial(x):
    return functools.reduce(torch.add, map(functools.partial(torch.mul, x), (1, 2, 3)))


def sorted_parts(x):
    parts = sorted(x.split(2, dim=1), key=lambda part: part.size(1))
    return torch.cat([*parts, *reversed(parts)], 1)


def shape_arithmetic(x):
    rows = x.shape[0]
    return x.view(rows * 2, -1) * (rows // 2) + math.prod(x.shape), rows + 1, tuple(x.shape)


def only_numbers(x):
    return x.shape[0] * 2


def nothing(x):
    x.sin()


def returns_input(x):
    y = x * 2
    return x, y, y


def constants(x):
    return x + torch.tensor([1.0] * 8) * torch.arange(8) + torch.zeros(x.size(0), 1)


def numpy_function(x):
    import numpy as np

    return torch.from_numpy(np.sin(x.numpy())) * 2


def einsum(x, y):
    return torch.einsum("bi,bj->bij", x, y).sum(0) @ torch.einsum("bi->i", x)


def complex_numbers(x):
    return torch.view_as_real(torch.view_as_complex(x.reshape(-1, 4, 2)) * 1j).abs()


def fourier(x):
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, dim=1)


def integers(x):
    i = (x * 10).to(torch.int64)
    return (i // 3) % 5 + (i << 1) + (i & 3)


def sort_and_gather(x):
    values, order = x.sort(dim=1, descending=True, stable=True)
    return values + x.gather(1, order).cumsum(1) + order


def where_and_mask(x):
    mask = torch.triu(torch.ones(x.size(0), x.size(0), dtype=torch.bool), 1)
    scores = (x @ x.T).masked_fill(mask, -math.inf)
    return torch.where(mask, 0, scores.softmax(-1)) @ x


def embedding_bag(ids):
    table = torch.arange(80.0).view(10, 8)
    return F.embedding(ids, table).mean(1) + F.one_hot(ids, 10).float().sum((1, 2))[:, None]


def quantile(x):
    return torch.quantile(x, torch.tensor([0.1, 0.9]), dim=1) + x.std() + x.median()


def linear_algebra(x):
    square = x.T @ x + 8 * torch.eye(8)
    return torch.linalg.solve(square, x.T) + torch.linalg.cholesky(square).sum()


def sparse(x):
    return torch.sparse.mm(x.relu().to_sparse(), x.T)


def random_numbers(x):
    return (torch.rand_like(x) < 2) * x + F.dropout(x, 0.0)


def generator_argument(x):
    g = torch.Generator().manual_seed(3)
    return x + torch.rand(x.shape, generator=g)


def bfloat(x):
    return (x.bfloat16() * 2).float() + x.half().float() + x.double().sum().float()


def list_of_tensors(xs):
    xs.append(xs[0] + xs[1])
    return [x.relu() for x in reversed(xs)]


def deep_nesting(tree):
    return {"out": (tree["a"][0] + tree["b"]["c"], [tree["a"][1]])}


def unused_argument(x, y):
    return x.sin()


def same_tensor_twice(x, y):
    return x + y * 2


def default_dtype(x):
    return x + torch.ones(8, dtype=torch.get_default_dtype())


def inference(x):
    with torch.inference_mode():
        return x * 2


PLAIN = {
    "add": lambda: (torch.add, pairs(3, 5, 9)),
    "dictionary": lambda: (dictionary, [({"a": R(n), "b": R(n)},) for n in (3, 5)]),
    "named_tuple": lambda: (named_tuple, [(Point(R(n), R(n)),) for n in (3, 5)]),
    "data_class": lambda: (data_class, rows(3, 5)),
    "closure": lambda: (closure, rows(3, 5)),
    "generator": lambda: (generator, rows(3, 5)),
    "exception": lambda: (exception, rows(3, 5)),
    "early_return": lambda: (early_return, [(R(3), True), (R(4), False), (R(5), True)]),
    "keyword": lambda: (lambda x, s: keyword(x, scale=s, a=x, b=x), [(R(3), 2.0), (R(5), 3.0)]),
    "while_loop_in_python": lambda: (while_loop_in_python, rows(3, 4, 5)),
    "string_key": lambda: (string_key, [(R(3), "sin"), (R(3), "cos")]),
    "partial": lambda: (partial, rows(3, 5)),
    "sorted_parts": lambda: (sorted_parts, rows(3, 5)),
    "shape_arithmetic": lambda: (shape_arithmetic, rows(4, 6)),
    "only_numbers": lambda: (only_numbers, rows(3, 5)),
    "nothing": lambda: (nothing, rows(3)),
    "returns_input": lambda: (returns_input, rows(3, 5)),
    "constants": lambda: (constants, rows(3, 5)),
    "numpy_function": lambda: (numpy_function, rows(3, 5)),
    "einsum": lambda: (einsum, pairs(3, 5)),
    "complex_numbers": lambda: (complex_numbers, rows(4, 6)),
    "fourier": lambda: (fourier, rows(3, 5)),
    "integers": lambda: (integers, rows(3, 5)),
    "sort_and_gather": lambda: (sort_and_gather, rows(3, 5)),
    "where_and_mask": lambda: (where_and_mask, rows(3, 5)),
    "embedding_bag": lambda: (embedding_bag, [(torch.randint(10, (n, 3)),) for n in (3, 5)]),
    "quantile": lambda: (quantile, rows(3, 5)),
    "linear_algebra": lambda: (linear_algebra, rows(9, 12)),
    "sparse": lambda: (sparse, rows(3, 5)),
    "random_numbers": lambda: (random_numbers, rows(3, 5)),
    "generator_argument": lambda: (generator_argument, rows(3, 5)),
    "bfloat": lambda: (bfloat, rows(3, 5)),
    "list_of_tensors": lambda: (list_of_tensors, [([R(3), R(3)],), ([R(5), R(5)],)]),
    "deep_nesting": lambda: (
        deep_nesting,
        [({"a": (R(n), R(n)), "b": {"c": R(n)}},) for n in (3, 5)],
    ),
    "unused_argument": lambda: (unused_argument, pairs(3, 5)),
    "same_tensor_twice": lambda: (same_tensor_twice, [(x, x) for (x,) in rows(3, 5)]),
    "default_dtype": lambda: (default_dtype, rows(3, 5)),
    "inference": lambda: (inference, rows(3, 5)),
    "scalar_tensor": lambda: (lambda x: x * torch.tensor(2.5) + x.sum(), rows(3, 5)),
    "zero_dim": lambda: (lambda x: x.sin() + 1, [(R(()),), (R(()),)]),
    "empty": lambda: (lambda x: x * 2 + x.sum(), rows(0, 3, 5)),
    "one_row": lambda: (lambda x: x.squeeze(0) * 2, rows(1, 3, 1)),
}


# In place, views, aliases.


def in_place(x):
    x.add_(1)
    return x * 2


def in_place_view(x):
    x[:, 1:3].mul_(2)
    x.t()[0] = 1
    return x.sum(1)


def in_place_and_return(x):
    x += 1
    return x, x.view(-1)


def write_to_other(x, y):
    y.copy_(x.sin())


def scatter(x):
    index = torch.arange(x.size(0)) % 3
    sums = torch.zeros(3, 8).index_add_(0, index, x)
    return sums.scatter_reduce(0, index[:, None].expand_as(x), x, "amax")


def index_put(x):
    x[torch.arange(x.size(0)), torch.arange(x.size(0)) % 8] = 0.5
    return x[:, [1, 2]] + x[..., None, 3:5].sum(1)


def strided(x):
    return x.as_strided((x.size(0), 4), (8, 2)) * 2 + x.unfold(1, 4, 4).sum(1)


def resize(x):
    y = torch.empty(0)
    torch.add(x, 1, out=y.resize_(x.shape))
    return y


def out_argument(x, out):
    return torch.mul(x, 3, out=out)


def detached(x):
    y = x.detach()
    y.zero_()
    return x + 1


VIEWS = {
    "in_place": lambda: (in_place, rows(3, 5)),
    "in_place_view": lambda: (in_place_view, rows(3, 5)),
    "in_place_and_return": lambda: (in_place_and_return, rows(3, 5)),
    "write_to_other": lambda: (write_to_other, pairs(3, 5)),
    "scatter": lambda: (scatter, rows(6, 9)),
    "index_put": lambda: (index_put, rows(3, 5)),
    "strided": lambda: (strided, rows(3, 5)),
    "resize": lambda: (resize, rows(3, 5)),
    "out_argument": lambda: (out_argument, pairs(3, 5)),
    "detached": lambda: (detached, rows(3, 5)),
    "transposed_input": lambda: (lambda x: x * 2 + x.sum(0), [(R(8, n).t(),) for n in (3, 5)]),
    "view_of_input": lambda: (lambda x: (x.view(-1), x[1:], x.t()), rows(3, 5)),
    "overlapping_inputs": lambda: (
        lambda x, y: x.add_(1) + y,
        [(base[:3], base[1:4]) for (base,) in rows(6, 7)],
    ),
    "expanded": lambda: (lambda x: x.expand(4, -1, -1) + 1, [(R(1, n, 8),) for n in (3, 5)]),
    "buffer_update": lambda: (Counting(), rows(3, 3)),
    "batch_norm_train": lambda: (nn.BatchNorm1d(8), rows(4, 6)),
    "module_list_state": lambda: (Cache(), rows(3, 3)),
}


# Numbers and sizes that depend on data or change between calls.


def item(x):
    return x * x.sum().item()


def item_as_size(x):
    return torch.ones(int(x.abs().max().item()) + 1) * 2


def branch_on_data(x):
    return x + 1 if x.sum() > 0 else x - 1


SCALARS = {
    "changing_int": lambda: (lambda x, k: x * k, [(R(3), k) for k in (2, 3, 4)]),
    "changing_float": lambda: (lambda x, k: x * k, [(R(3), k) for k in (2.5, 3.5, 4.5)]),
    "changing_topk": lambda: (lambda x, k: x.topk(k).values, [(R(9), k) for k in (2, 3, 4)]),
    "changing_range": lambda: (lambda x, k: x[:k].sum(), [(R(9), k) for k in (2, 3, 4)]),
    "int_and_shape": lambda: (lambda x, k: x * k + x.size(0), [(R(k), k) for k in (2, 3, 4)]),
    "changing_ones": lambda: (lambda k: torch.ones(k) * 2, [(2,), (3,), (4,)]),
    "timestep": lambda: (
        lambda x, t: x + torch.tensor([t]).float(),
        [(R(3), t) for t in (5, 7, 9)],
    ),
    "positive": lambda: (lambda x: x[x > 0] * 2, [(R(n),) for n in (9, 12)]),
    "nonzero": lambda: (lambda x: x.nonzero(), [(R(n),) for n in (9, 12)]),
    "nonzero_count": lambda: (lambda x: x * x.nonzero().shape[0], [(R(n),) for n in (9, 12)]),
    "unique": lambda: (
        lambda x: torch.unique(x) * 2,
        [(torch.randint(4, (n,)),) for n in (9, 12)],
    ),
    "repeat_interleave": lambda: (
        lambda x: x.repeat_interleave(torch.arange(x.size(0)), 0),
        rows(3, 5),
    ),
    "masked_select": lambda: (lambda x: x.masked_select(x > 0).sum(), rows(3, 5)),
    "item": lambda: (item, rows(3, 5)),
    "item_as_size": lambda: (item_as_size, rows(3, 5)),
    "branch_on_data": lambda: (branch_on_data, rows(3, 5)),
    "tolist": lambda: (
        lambda x, n: x.split(n.tolist()),
        [(R(6), torch.tensor([2, 4])), (R(6), torch.tensor([3, 3]))],
    ),
    "bool_tensor": lambda: (
        lambda x, m: torch.where(m, x, 0)[m],
        [(R(n), R(n) > 0) for n in (9, 12)],
    ),
}


# Several dynamic sizes.


def attention(q, k):
    return F.scaled_dot_product_attention(q, k, k, is_causal=q.size(-2) == k.size(-2))


SHAPES = {
    "conv_pixels": lambda: (
        seeded(nn.Conv2d(3, 4, 3)),
        [(R(1, 3, n, m),) for n, m in ((16, 16), (20, 24), (18, 30))],
    ),
    "conv_batch": lambda: (
        seeded(nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))),
        [(R(b, 3, n, n),) for b, n in ((1, 16), (2, 20), (3, 24))],
    ),
    "conv_1d": lambda: (seeded(nn.Conv1d(4, 6, 3, padding=1)), [(R(2, 4, n),) for n in (7, 9, 12)]),
    "conv_transposed": lambda: (
        seeded(nn.ConvTranspose2d(3, 2, 2, 2)),
        [(R(1, 3, n, n),) for n in (4, 6)],
    ),
    "interpolate": lambda: (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        [(R(1, 3, n, n),) for n in (4, 6, 7)],
    ),
    "interpolate_to": lambda: (
        lambda x, y: F.interpolate(x, size=y.shape[-2:], mode="bicubic"),
        [(R(1, 3, 4, 4), R(1, 3, n, n)) for n in (6, 8, 9)],
    ),
    "adaptive_pool": lambda: (
        nn.AdaptiveAvgPool2d(3),
        [(R(1, 3, n, n),) for n in (6, 9, 12)],
    ),
    "pad": lambda: (
        lambda x: F.pad(x, (0, -x.size(-1) % 8)).view(x.size(0), -1, 8),
        [(R(2, n),) for n in (5, 9, 14)],
    ),
    "attention": lambda: (
        attention,
        [(R(2, 2, q, 8), R(2, 2, k, 8)) for q, k in ((3, 3), (5, 7), (6, 6))],
    ),
    "matrices": lambda: (
        torch.matmul,
        [(R(a, b), R(b, c)) for a, b, c in ((2, 3, 4), (5, 6, 7), (3, 9, 2))],
    ),
    "broadcast": lambda: (
        lambda x, y: x + y,
        [(R(3, 1), R(1, 4)), (R(5, 1), R(1, 6)), (R(5, 6), R(1, 6))],
    ),
    "cat": lambda: (lambda x, y: torch.cat([x, y, x]), [(R(2, 8), R(3, 8)), (R(4, 8), R(7, 8))]),
    "reshape": lambda: (
        lambda x: x.reshape(-1, 4).sum(0) + x.reshape(2, -1).sum(),
        rows(4, 6, 8),
    ),
    "chunk": lambda: (lambda x: x.chunk(2, 0), rows(4, 6, 7)),
    "recurrent": lambda: (seeded(nn.GRU(8, 6, batch_first=True)), [(R(2, n, 8),) for n in (3, 5)]),
    "transformer_layer": lambda: (
        seeded(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)).train(),
        [(R(2, n, 8),) for n in (3, 5)],
    ),
    "blocks": lambda: (seeded(nn.Sequential(*(Block() for _ in range(4)))), rows(3, 5, 9)),
    "marked": lambda: (lambda x: x * 2, [(marked(R(n, 8)),) for n in (5, 9)]),
}


def marked(x):
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    return x


# Graph breaks.


def printing(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos() + x.size(0)


def break_in_loop(x):
    for i in range(3):
        x = x + i
        torch._dynamo.graph_break()
    return x


@torch.compiler.disable
def opaque(x):
    return x + 1


def try_break(x):
    try:
        if x.sum() > 1e9:
            raise ValueError
        return x * 2
    finally:
        x.add_(1)


def numpy_break(x):
    return x + float(sum(x.detach().flatten().tolist()))


BREAKS = {
    "graph_break": lambda: (printing, rows(3, 5)),
    "break_in_loop": lambda: (break_in_loop, rows(3, 5)),
    "disabled_function": lambda: (lambda x: opaque(x.sin()) * 2, rows(3, 5)),
    "try_break": lambda: (try_break, rows(3, 5)),
    "numpy_break": lambda: (numpy_break, rows(3, 5)),
    "hooked": lambda: (hooked(), rows(3, 5)),
    "weak_reference": lambda: (lambda x: x + id(x) * 0, rows(3, 5)),
}


def hooked():
    model = seeded(nn.Linear(8, 8))
    model.register_forward_hook(lambda module, args, result: result * 2)
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


# Training.


def trained(model, call=None):
    """A step of training: loss and gradients."""

    def step(run, *args):
        loss = (call or (lambda f, *a: f(*a)))(run, *args).square().sum()
        weights = [w for w in model.parameters() if w.requires_grad]
        return loss.detach(), *torch.autograd.grad(loss, weights, allow_unused=True)

    model.step = step
    return model


def leaf(*shape):
    return R(*shape).requires_grad_()


TRAINING = {
    "train_mlp": lambda: (trained(seeded(Block()).train()), rows(3, 5)),
    "train_conv": lambda: (
        trained(seeded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).train()),
        [(R(2, 3, n, n),) for n in (8, 10)],
    ),
    "train_embedding": lambda: (
        trained(seeded(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)))),
        [(torch.randint(10, (n,)),) for n in (3, 5)],
    ),
    "train_attention": lambda: (
        trained(seeded(nn.MultiheadAttention(8, 2, batch_first=True)), lambda f, x: f(x, x, x)[0]),
        [(R(2, n, 8),) for n in (3, 5)],
    ),
    "train_frozen": lambda: (
        trained(
            nn.Sequential(seeded(nn.Linear(8, 8)).requires_grad_(False), seeded(nn.Linear(8, 8)))
        ),
        rows(3, 5),
    ),
    "leaf_input": lambda: (lambda x: (x * x).sin(), [(leaf(3, 8),), (leaf(5, 8),)]),
    "own_function": lambda: (Square.apply, [(leaf(3),), (leaf(5),)]),
    "checkpointed": lambda: (
        lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False) * 2,
        [(leaf(3),), (leaf(5),)],
    ),
    "no_grad_inside": lambda: (no_grad_inside, [(leaf(3),), (leaf(5),)]),
    "grad_in_graph": lambda: (grad_in_graph, [(leaf(3),), (leaf(5),)]),
    "optimizer": lambda: (optimizer_step(), rows(3, 3)),
}


def no_grad_inside(x):
    with torch.no_grad():
        y = x * 2
    return y + x.sin()


def grad_in_graph(x):
    return x.detach().clone().requires_grad_().sin() + x


def optimizer_step():
    model = seeded(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


# Transforms and higher-order operators.


def flex(q):
    from torch.nn.attention.flex_attention import flex_attention

    def score(s, b, h, q_idx, k_idx):
        return s + (q_idx - k_idx)

    return flex_attention(q, q, q, score_mod=score)


def flex_mask(q):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, q.size(2), q.size(2), device="cpu"
    )
    return flex_attention(q, q, q, block_mask=mask)


def conditional(x):
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


def nested_regions():
    class Region(Block):
        forward = torch.compiler.nested_compile_region(Block.forward)

    return nn.Sequential(*(seeded(Region()) for _ in range(3)))


TRANSFORMS = {
    "vmap": lambda: (lambda x: torch.vmap(lambda r: r.sin().sum())(x), rows(3, 5)),
    "vmap_matrix": lambda: (lambda x: torch.vmap(torch.outer)(x, x), rows(3, 5)),
    "jacrev": lambda: (torch.func.jacrev(torch.sin), [(R(3),), (R(5),)]),
    "jacfwd": lambda: (torch.func.jacfwd(torch.sin), [(R(3),), (R(5),)]),
    "grad": lambda: (torch.func.grad(lambda x: x.sin().sum()), rows(3, 5)),
    "jvp": lambda: (lambda x: torch.func.jvp(torch.sin, (x,), (x,)), rows(3, 5)),
    "hessian": lambda: (torch.func.hessian(lambda x: x.pow(3).sum()), [(R(3),), (R(4),)]),
    "flex": lambda: (flex, [(R(1, 2, n, 16),) for n in (32, 48)]),
    "flex_mask": lambda: (flex_mask, [(R(1, 2, n, 16),) for n in (128, 256)]),
    "cond": lambda: (conditional, rows(3, 5)),
    "nested_regions": lambda: (nested_regions(), rows(3, 5)),
    "functional_call": lambda: (
        lambda x: torch.func.functional_call(
            nn.Linear(8, 2), {"weight": x[:2], "bias": x[0, :2]}, x
        ),
        rows(3, 5),
    ),
}


# Autocast and dtypes.


def autocast(x, y):
    with torch.autocast("cpu", torch.bfloat16):
        z = x @ y.T
        with torch.autocast("cpu", enabled=False):
            return z.float() + (x @ y.T)


AUTOCAST = {
    "autocast": lambda: (autocast, pairs(3, 5)),
    "autocast_model": lambda: (
        torch.autocast("cpu", torch.bfloat16)(seeded(Block()).forward),
        rows(3, 5),
    ),
    "bfloat_model": lambda: (
        seeded(Block()).bfloat16(),
        [(R(n, 8).bfloat16(),) for n in (3, 5)],
    ),
    "double_model": lambda: (seeded(Block()).double(), [(R(n, 8).double(),) for n in (3, 5)]),
    "parametrized": lambda: (
        nn.utils.parametrizations.weight_norm(seeded(nn.Linear(8, 8))),
        rows(3, 5),
    ),
    "quantized_weight": lambda: (
        lambda x: x @ (torch.arange(64, dtype=torch.int8).view(8, 8).float() * 0.1),
        rows(3, 5),
    ),
}


# Models with random weights.


def transformers_model(name, inputs, **settings):
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings)
    model = seeded(getattr(transformers, f"{name}Model")(config))
    return lambda *args: tuple(
        value for value in model(*args).to_tuple() if isinstance(value, Tensor)
    ), [(each,) for each in inputs()]


def images(*sizes, batch=1):
    return lambda: [R(batch + i, 3, n, n) for i, n in enumerate(sizes)]


def ids(*sizes):
    return lambda: [torch.randint(3, 90, (2, n)) for n in sizes]


def timm_model(name, *sizes, **settings):
    import timm

    model = seeded(timm.create_model(name, num_classes=4, **settings))
    return model, [(R(1 + i, 3, n, n),) for i, n in enumerate(sizes)]


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def unet():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    model = seeded(model)
    text = R(1, 5, 16)
    return lambda x, t: model(x, t, text, return_dict=False)[0], [
        (R(1, 4, n, n), t) for n, t in ((8, 5), (8, 7), (16, 11))
    ]


def vae():
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    model = seeded(model)
    return lambda x: model.decode(model.encode(x).latent_dist.mode()).sample, [
        (R(1, 3, n, n),) for n in (16, 24)
    ]


def dit():
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2,
        sample_size=8, norm_num_groups=4, num_embeds_ada_norm=10, dropout=0.0,
    )  # fmt: skip
    model = seeded(model)
    return lambda x, t, y: model(x, t, y, return_dict=False)[0], [
        (R(b, 4, 8, 8), torch.full((b,), 3), torch.zeros(b, dtype=torch.long)) for b in (1, 2, 3)
    ]


def flux():
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    model = seeded(model)

    def call(x, t):
        return model(
            hidden_states=x, timestep=t, encoder_hidden_states=torch.ones(1, 6, 32),
            pooled_projections=torch.ones(1, 32), img_ids=torch.zeros(x.size(1), 3),
            txt_ids=torch.zeros(6, 3), return_dict=False,
        )[0]  # fmt: skip

    return call, [(R(1, n, 4), torch.tensor([0.5])) for n in (16, 24)]


MODELS = {
    "vit": lambda: transformers_model("ViT", images(32, 32), image_size=32, patch_size=8, **SMALL),
    "clip_vision": lambda: transformers_model(
        "CLIPVision", images(32, 32), image_size=32, patch_size=8, **SMALL
    ),
    "siglip_vision": lambda: transformers_model(
        "SiglipVision", images(32, 32), image_size=32, patch_size=8, **SMALL
    ),
    "dinov2": lambda: transformers_model(
        "Dinov2", images(28, 42), image_size=28, patch_size=7, mlp_ratio=2,
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    ),
    "convnext": lambda: transformers_model(
        "ConvNext", images(32, 64), hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]
    ),
    "bert": lambda: transformers_model("Bert", ids(5, 9), vocab_size=99, **SMALL),
    "roberta": lambda: transformers_model("Roberta", ids(5, 9), vocab_size=99, **SMALL),
    "gpt2": lambda: transformers_model(
        "GPT2", ids(5, 9), vocab_size=99, n_embd=32, n_layer=2, n_head=2, use_cache=False
    ),
    "llama": lambda: transformers_model(
        "Llama", ids(5, 9), vocab_size=99, use_cache=False, **SMALL
    ),
    "llama_cache": lambda: transformers_model("Llama", ids(5, 9), vocab_size=99, **SMALL),
    "gemma3_text": lambda: transformers_model(
        "Gemma3Text", ids(5, 9), vocab_size=99, head_dim=16, num_key_value_heads=1,
        use_cache=False, **SMALL,
    ),
    "mamba": lambda: transformers_model(
        "Mamba", ids(5, 9), vocab_size=99, hidden_size=16, num_hidden_layers=2, state_size=4,
        use_cache=False,
    ),
    "t5_encoder": lambda: t5_encoder(),
    "whisper_encoder": lambda: whisper_encoder(),
    "wav2vec2": lambda: transformers_model(
        "Wav2Vec2", lambda: [R(1, n) for n in (2000, 3000)], conv_dim=(8, 8), conv_stride=(5, 4),
        conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, **SMALL,
    ),
    "timm_resnet18": lambda: timm_model("resnet18", 64, 96),
    "timm_vit": lambda: timm_model(
        "vit_tiny_patch16_224", 32, 48, img_size=32, depth=2, dynamic_img_size=True
    ),
    "timm_efficientnet": lambda: timm_model("efficientnet_lite0", 64, 64),
    "timm_swin": lambda: timm_model(
        "swin_tiny_patch4_window7_224", 56, 56, img_size=56, window_size=7, depths=(1, 1),
        num_heads=(2, 2), embed_dim=16,
    ),
    "timm_mixer": lambda: timm_model("mixer_s32_224", 64, 64, img_size=64),
    "diffusers_unet": unet,
    "diffusers_vae": vae,
    "diffusers_dit": dit,
    "diffusers_flux": flux,
}  # fmt: skip


def t5_encoder():
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=99, d_model=32, d_ff=64, d_kv=16, num_heads=2, num_layers=2)
    model = seeded(T5EncoderModel(config))
    return lambda x: model(x).last_hidden_state, [(each,) for each in ids(5, 9)()]


def whisper_encoder():
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    encoder = seeded(WhisperModel(config).encoder)
    return lambda x: encoder(x).last_hidden_state, [(R(b, 8, 40),) for b in (1, 2, 3)]


GROUPS = {
    "plain": PLAIN, "views": VIEWS, "scalars": SCALARS, "shapes": SHAPES, "breaks": BREAKS,
    "training": TRAINING, "transforms": TRANSFORMS, "autocast": AUTOCAST, "models": MODELS,
}  # fmt: skip
PROGRAMS = {name: make for group in GROUPS.values() for name, make in group.items()}
NEEDED = {"timm": ("timm", "torchvision"), "diffusers": ("diffusers",)}
"""Packages that programs need whose names begin so."""


def results_of(name, compiler):
    """The results and arguments of all calls of a program, with its function compiled."""
    torch.manual_seed(0)
    function, calls = PROGRAMS[name]()
    compiled, results = compiler(function), []
    torch.manual_seed(0)
    with nullcontext() if name in TRAINING else torch.no_grad():
        for call in calls:
            args = [copied(value) for value in copy.copy(call)]
            step = getattr(function, "step", None)
            results.append((step(compiled, *args) if step else compiled(*args), args))
    return results


def copied(value):
    """A copy of an argument that keeps what is dynamic, and is a leaf again."""
    if isinstance(value, Tensor):
        keeps = value.is_contiguous() and value._base is None
        return value.detach().clone().requires_grad_(value.requires_grad) if keeps else value
    return copy.deepcopy(value)


def difference(one, other):
    """How the results of two runs differ; None if they do not."""
    (left, form), (right, other_form) = tree_flatten(one), tree_flatten(other)
    if form != other_form:
        return f"{form} is not {other_form}"
    for a, b in zip(left, right, strict=True):
        if not isinstance(a, Tensor | float):
            if a != b:
                return f"{a} is not {b}"
            continue
        try:
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4, equal_nan=True)
        except AssertionError as error:
            return str(error).partition("\n")[0]
    return None


def try_program(name, backend, options):
    """What is wrong with a program under a backend; None if it equals eager."""
    expected = results_of(name, lambda function: function)
    torch.compiler.reset()
    try:
        actual = results_of(
            name, lambda function: torch.compile(function, backend=backend, options=options)
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return difference(actual, expected)


def main(cache, names):
    import piecegraph as pg

    warnings.simplefilter("ignore")
    selected = [name for each in names for name in GROUPS.get(each, {each: None})] or PROGRAMS
    for name in selected:
        events = pg.Events()
        fault = try_program(name, "piecegraph", {"events": events, "cache_dir": cache})
        line = {
            "name": name,
            "fault": fault,
            "inductor": None if fault is None else try_program(name, "inductor", {}),
            "graphs": events.counters["backend.graphs"],
            "fallbacks": events.counters["backend.fallbacks"],
            "compiles": events.counters["inductor_compiles"],
            "reasons": sorted({e.facts["reason"][:160] for e in events.named("backend.fallback")}),
            "not_kept": [e.facts["reason"][:160] for e in events.named("artifact.not_kept")],
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
