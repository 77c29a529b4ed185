"""Programs for `torch.compile(backend="piecegraph")`, in the style of torch's own reproductions.

Each gives a function and the arguments of its calls. `python -m tests.compile.backend_programs
CACHE [NAME...]` runs them in one process and prints a line of JSON for each. What fails is run with
Inductor alone: a program that runs there must run here.
"""

import collections
import copy
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


def early_return(x, flag):
    if flag:
        return x + 1
    return x - 1


def sorted_parts(x):
    parts = sorted(x.split(2, dim=1), key=lambda part: part.size(1))
    return torch.cat([*parts, *reversed(parts)], 1)


def shape_arithmetic(x):
    rows = x.shape[0]
    return x.view(rows * 2, -1) * (rows // 2) + math.prod(x.shape), rows + 1, tuple(x.shape)


def only_numbers(x):
    return x.shape[0] * 2


def returns_input(x):
    y = x * 2
    return x, y, y


def constants(x):
    return x + torch.tensor([1.0] * 8) * torch.arange(8) + torch.zeros(x.size(0), 1)


def complex_numbers(x):
    return torch.view_as_real(torch.view_as_complex(x.reshape(-1, 4, 2)) * 1j).abs()


def sparse(x):
    return torch.sparse.mm(x.relu().to_sparse(), x.T)


def random_numbers(x):
    return (torch.rand_like(x) < 2) * x + F.dropout(x, 0.0)


def generator_argument(x):
    g = torch.Generator().manual_seed(3)
    return x + torch.rand(x.shape, generator=g)


def list_of_tensors(xs):
    xs.append(xs[0] + xs[1])
    return [x.relu() for x in reversed(xs)]


def inference(x):
    with torch.inference_mode():
        return x * 2


PLAIN = {
    "add": lambda: (torch.add, pairs(3, 5, 9)),
    "dictionary": lambda: (dictionary, [({"a": R(n), "b": R(n)},) for n in (3, 5)]),
    "named_tuple": lambda: (named_tuple, [(Point(R(n), R(n)),) for n in (3, 5)]),
    "early_return": lambda: (early_return, [(R(3), True), (R(4), False), (R(5), True)]),
    "sorted_parts": lambda: (sorted_parts, rows(3, 5)),
    "shape_arithmetic": lambda: (shape_arithmetic, rows(4, 6)),
    "only_numbers": lambda: (only_numbers, rows(3, 5)),
    "returns_input": lambda: (returns_input, rows(3, 5)),
    "constants": lambda: (constants, rows(3, 5)),
    "complex_numbers": lambda: (complex_numbers, rows(4, 6)),
    "sparse": lambda: (sparse, rows(3, 5)),
    "random_numbers": lambda: (random_numbers, rows(3, 5)),
    "generator_argument": lambda: (generator_argument, rows(3, 5)),
    "list_of_tensors": lambda: (list_of_tensors, [([R(3), R(3)],), ([R(5), R(5)],)]),
    "inference": lambda: (inference, rows(3, 5)),
    "zero_dim": lambda: (lambda x: x.sin() + 1, [(R(()),), (R(()),)]),
    "empty": lambda: (lambda x: x * 2 + x.sum(), rows(0, 3, 5)),
}


# In place, views, aliases.


def in_place_view(x):
    x[:, 1:3].mul_(2)
    x.t()[0] = 1
    return x.sum(1)


def write_to_other(x, y):
    y.copy_(x.sin())


def scatter(x):
    index = torch.arange(x.size(0)) % 3
    sums = torch.zeros(3, 8).index_add_(0, index, x)
    return sums.scatter_reduce(0, index[:, None].expand_as(x), x, "amax")


def strided(x):
    return x.as_strided((x.size(0), 4), (8, 2)) * 2 + x.unfold(1, 4, 4).sum(1)


def resize(x):
    y = torch.empty(0)
    torch.add(x, 1, out=y.resize_(x.shape))
    return y


def detached(x):
    y = x.detach()
    y.zero_()
    return x + 1


VIEWS = {
    "in_place_view": lambda: (in_place_view, rows(3, 5)),
    "write_to_other": lambda: (write_to_other, pairs(3, 5)),
    "scatter": lambda: (scatter, rows(6, 9)),
    "strided": lambda: (strided, rows(3, 5)),
    "resize": lambda: (resize, rows(3, 5)),
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
    "timestep": lambda: (
        lambda x, t: x + torch.tensor([t]).float(),
        [(R(3), t) for t in (5, 7, 9)],
    ),
    "positive": lambda: (lambda x: x[x > 0] * 2, [(R(n),) for n in (9, 12)]),
    "nonzero_count": lambda: (lambda x: x * x.nonzero().shape[0], [(R(n),) for n in (9, 12)]),
    "unique": lambda: (
        lambda x: torch.unique(x) * 2,
        [(torch.randint(4, (n,)),) for n in (9, 12)],
    ),
    "masked_select": lambda: (lambda x: x.masked_select(x > 0).sum(), rows(3, 5)),
    "item": lambda: (item, rows(3, 5)),
    "item_as_size": lambda: (item_as_size, rows(3, 5)),
    "branch_on_data": lambda: (branch_on_data, rows(3, 5)),
    "tolist": lambda: (
        lambda x, n: x.split(n.tolist()),
        [(R(6), torch.tensor([2, 4])), (R(6), torch.tensor([3, 3]))],
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
    "interpolate": lambda: (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        [(R(1, 3, n, n),) for n in (4, 6, 7)],
    ),
    "interpolate_to": lambda: (
        lambda x, y: F.interpolate(x, size=y.shape[-2:], mode="bicubic"),
        [(R(1, 3, 4, 4), R(1, 3, n, n)) for n in (6, 8, 9)],
    ),
    "attention": lambda: (
        attention,
        [(R(2, 2, q, 8), R(2, 2, k, 8)) for q, k in ((3, 3), (5, 7), (6, 6))],
    ),
    "reshape": lambda: (
        lambda x: x.reshape(-1, 4).sum(0) + x.reshape(2, -1).sum(),
        rows(4, 6, 8),
    ),
    "recurrent": lambda: (seeded(nn.GRU(8, 6, batch_first=True)), [(R(2, n, 8),) for n in (3, 5)]),
    "transformer_layer": lambda: (
        seeded(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)).train(),
        [(R(2, n, 8),) for n in (3, 5)],
    ),
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


@torch.compiler.disable
def opaque(x):
    return x + 1


def numpy_break(x):
    return x + float(sum(x.detach().flatten().tolist()))


BREAKS = {
    "graph_break": lambda: (printing, rows(3, 5)),
    "disabled_function": lambda: (lambda x: opaque(x.sin()) * 2, rows(3, 5)),
    "numpy_break": lambda: (numpy_break, rows(3, 5)),
}


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
    "leaf_input": lambda: (lambda x: (x * x).sin(), [(leaf(3, 8),), (leaf(5, 8),)]),
    "own_function": lambda: (Square.apply, [(leaf(3),), (leaf(5),)]),
    "checkpointed": lambda: (
        lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False) * 2,
        [(leaf(3),), (leaf(5),)],
    ),
    "optimizer": lambda: (optimizer_step(), rows(3, 3)),
}


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


def conditional(x):
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


def nested_regions():
    class Region(Block):
        forward = torch.compiler.nested_compile_region(Block.forward)

    return nn.Sequential(*(seeded(Region()) for _ in range(3)))


TRANSFORMS = {
    "vmap": lambda: (lambda x: torch.vmap(lambda r: r.sin().sum())(x), rows(3, 5)),
    "jacrev": lambda: (torch.func.jacrev(torch.sin), [(R(3),), (R(5),)]),
    "hessian": lambda: (torch.func.hessian(lambda x: x.pow(3).sum()), [(R(3),), (R(4),)]),
    "flex": lambda: (flex, [(R(1, 2, n, 16),) for n in (32, 48)]),
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
    "bfloat_model": lambda: (
        seeded(Block()).bfloat16(),
        [(R(n, 8).bfloat16(),) for n in (3, 5)],
    ),
    "parametrized": lambda: (
        nn.utils.parametrizations.weight_norm(seeded(nn.Linear(8, 8))),
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
    "convnext": lambda: transformers_model(
        "ConvNext", images(32, 64), hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]
    ),
    "bert": lambda: transformers_model("Bert", ids(5, 9), vocab_size=99, **SMALL),
    "llama_cache": lambda: transformers_model("Llama", ids(5, 9), vocab_size=99, **SMALL),
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
    "timm_swin": lambda: timm_model(
        "swin_tiny_patch4_window7_224", 56, 56, img_size=56, window_size=7, depths=(1, 1),
        num_heads=(2, 2), embed_dim=16,
    ),
    "diffusers_unet": unet,
    "diffusers_vae": vae,
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
