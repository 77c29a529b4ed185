"""Hugging Face models through the adapter: equal to their own eager attention."""

import copy
import functools
import inspect

import pytest
import torch

from piecegraph import (
    Batch,
    Config,
    ForwardContext,
    ReplayBackend,
    ReplayOptions,
    forward_context,
    prepare,
)
from piecegraph.errors import LayerMissing, MissingMetadata, ModelNotAdaptable

transformers = pytest.importorskip("transformers")

from piecegraph.tools.integrations.transformers import (  # noqa: E402
    INPUTS,
    SPLITTING_OP,
    PackedModel,
    PackedRequests,
    adapt,
    attend_packed,
)
from piecegraph.tools.integrations.transformers.attention import (  # noqa: E402
    Mask,
    UnknownMask,
    mask_of,
)
from piecegraph.tools.integrations.transformers.mixers import Mixer, UnknownCall  # noqa: E402
from tests.text_compiler import use_text_compiler  # noqa: E402

from . import families  # noqa: E402
from .families import assert_as_alone, results  # noqa: E402

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

SAMPLE = (
    "gemma3_text",
    "lfm2",  # a convolution
    "megatron-bert",  # attention that does not use AttentionInterface, without a mask
    "deepseek_v3",  # values of another width than keys
    "doge",  # attention with a mask of its own
    *(
        pytest.param(family, marks=pytest.mark.heavy)
        for family in (
            "mamba2",  # no attention
            "modernbert",  # a window on both sides
            "convbert",  # a convolution inside of attention that does not use the interface
            "biogpt",  # makes a padding mask of ones
            "llama4_text",  # chunks of 8 tokens in one layer
            "gpt_oss",  # sinks
            "llama",  # test_model_is_compiled_with_its_own_inputs
            "qwen3_moe",
            "phimoe",  # a window of 8 tokens that is in the mask alone
            "gpt2",
            "bert",
        )
    ),
)
"""Of the families in docs/models.md."""


@pytest.fixture(scope="module")
def own_model():
    """`own_model(family)`, with random weights and its own attention; not to be changed."""
    return functools.cache(families.own_model)


def step(function, *args, query_lens, layers=None):
    with forward_context(ForwardContext(layers or {}, PackedRequests(query_lens))):
        return function(*args)


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("family", SAMPLE)
def test_family_equals_its_own_attention(compiled, own_model, family, traced):
    """Traced in each run: test_hf_released.py, with others of these families."""
    own = own_model(family)
    made = model = PackedModel(copy.deepcopy(own))
    if traced:
        settings = {"inputs": INPUTS, "max_num_tokens": 64}
        made = compiled(model, splitting_ops=model.settings["splitting_ops"], **settings)
    for lengths in ((1,), (2,), (7,), (33,), (3, 1, 20)):
        requests = torch.randint(64, (sum(lengths),)).split(lengths)
        assert_as_alone(own, requests, results(made, requests, model.layers))


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "bert"])
def test_family_under_inductor(compiled, own_model, family):
    own = own_model(family)
    model = PackedModel(copy.deepcopy(own))
    settings = {"inputs": INPUTS, "splitting_ops": (SPLITTING_OP,), "max_num_tokens": 64}
    made = compiled(model, compiler="inductor", **settings)
    for size in (1, 7, 64):
        requests = [torch.randint(64, (size,))]
        assert_as_alone(own, requests, results(made, requests, model.layers))


REFUSED = {
    "xlnet": r"from row \d+ of a step differs .* the first layer to differ is layer\.0",
    "bart": r"its decoder attends to another sequence",
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_the_op_cannot_compute_is_refused(own_model, family):
    with pytest.raises(ModelNotAdaptable, match=REFUSED[family]):
        PackedModel(copy.deepcopy(own_model(family)))


def test_adapt_refuses_attention_that_it_cannot_route(own_model):
    for family, reason in (("bloom", "does not go through"), ("mamba", "none of its layers")):
        with pytest.raises(ModelNotAdaptable, match=reason):
            adapt(copy.deepcopy(own_model(family)))


def test_layers_that_mix_tokens_are_splitting_ops():
    model = PackedModel(families.own_model("lfm2"))
    assert model.settings["splitting_ops"] == (SPLITTING_OP, "piecegraph_hf::mixer")
    assert list(model.layers) == ["layers.0.conv"]
    with pytest.raises(LayerMissing, match="layers.0.conv"):
        step(model, torch.arange(3), torch.arange(3), query_lens=(3,))


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda x: (x, x * 2), "several tensors"),
        (lambda x: x[0] @ x[0].T, "one row"),
        (lambda x: {"x": x}, "dict"),
        (lambda x: x.sum(1), "one row"),
    ],
)
def test_results_that_a_mixer_cannot_give_are_refused(result, said):
    module = torch.nn.Module()
    module.forward = result
    with pytest.raises(UnknownCall, match=said) as caught:
        Mixer(module, "layers.0").learn((3, 5, 3), torch.randn(1, 11, 3))
    assert caught.value.layer == "layers.0"


def test_masks_are_read_from_their_functions():
    from transformers import masking_utils as masks

    window = masks.sliding_window_causal_mask_function(8)
    remapped = masks.remap_positions_for_packed_sequence(window, torch.zeros(1))
    packed = masks.and_masks(remapped, masks.packed_sequence_mask_function(torch.zeros(1)))
    assert mask_of(window) == mask_of(packed) == Mask(causal=True, window=8)
    both = masks.sliding_window_bidirectional_mask_function(8)
    assert mask_of(both) == Mask(causal=False, window=9)
    chunks = masks.chunked_causal_mask_function(16, torch.zeros(1))
    assert mask_of(chunks) == Mask(causal=True, chunk=16)
    images = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(torch.zeros(1)))
    for unknown in (images, masks.and_masks(window, lambda *index: index[0] > 0)):
        with pytest.raises(UnknownMask):
            mask_of(unknown)


class Tempered(transformers.LlamaModel):
    """A model whose attention takes an argument that the op does not know."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs, temperature=2.0)


def test_an_argument_that_changes_results_is_found_by_comparing_them(monkeypatch):
    """One that changes none is known from then on; another is an error in the trace."""
    own = transformers.LlamaModel(families.tiny_config("llama")).eval()
    model = adapt(copy.deepcopy(own), {"input_ids": torch.arange(5)[None], "silent": 1})
    context = ForwardContext({}, PackedRequests((5,)))
    with forward_context(context), torch.no_grad():
        hidden = model(torch.arange(5)[None], silent=2).last_hidden_state
        torch.testing.assert_close(hidden, own(torch.arange(5)[None]).last_hidden_state)
        with pytest.raises(NotImplementedError, match=r"attention with \['loud'\]"):
            model(torch.arange(5)[None], loud=1)
    modeling = inspect.getmodule(transformers.LlamaModel)
    attention = modeling.eager_attention_forward

    def tempered(module, query, *args, temperature=1.0, **kwargs):
        return attention(module, query / temperature, *args, **kwargs)

    monkeypatch.setattr(modeling, "eager_attention_forward", tempered)
    warm = Tempered(families.tiny_config("llama")).eval()
    warm.set_attn_implementation("eager")
    with pytest.raises(ModelNotAdaptable, match="another result than alone"):
        adapt(warm)


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
VISION = {**SIZES, "intermediate_size": 48, "image_size": 16, "patch_size": 8}
ENCODERS = {
    "vit": (
        lambda: transformers.ViTModel(transformers.ViTConfig(**VISION)),
        (3, 16, 16),
        5,
    ),
    "siglip": (
        lambda: transformers.SiglipVisionModel(
            transformers.SiglipVisionConfig(**VISION, vision_use_head=False)
        ),
        (3, 16, 16),
        4,
    ),
    "clip": (
        lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION)),
        (3, 16, 16),
        5,
    ),
    "whisper": (
        lambda: transformers.WhisperModel(
            transformers.WhisperConfig(
                d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
                vocab_size=64, max_source_positions=6, num_mel_bins=8, pad_token_id=0,
            )
        ).get_encoder(),
        (8, 12),
        6,
    ),
}  # fmt: skip
"""An encoder, the form of an image or a sound, and its number of tokens."""


@pytest.mark.parametrize("name", ["vit", *(pytest.param(n, marks=pytest.mark.heavy)
                                           for n in ("siglip", "clip", "whisper"))])  # fmt: skip
def test_encoder_has_graphs_by_number_of_images(name):
    """A budget of images in a batch, and of tokens in an image: each image is a request.

    There is no guard on the number of images: a batch of one has a graph of one.
    """
    make, form, tokens = ENCODERS[name]
    torch.manual_seed(0)
    own = make().eval().requires_grad_(False)
    main = own.main_input_name
    model = adapt(copy.deepcopy(own), {main: torch.rand(2, *form)})
    config = Config(
        inputs={main: f"float32[num_tokens, {', '.join(map(str, form))}]"},
        splitting_ops=(SPLITTING_OP,),
        max_num_tokens=4,
        max_num_reqs=4,
        capture_sizes=(1, 2, 4),
        graph_mode="PIECEWISE",
        compiler="eager",
        cache=False,
    )
    backend = ReplayBackend(ReplayOptions(poison_before_replay=True, fail_on_moved_inputs=True))
    examples = ((), {main: torch.rand(3, *form)})
    prepared = prepare(model, config, examples=examples, backend=backend)
    prepared.capture(lambda descriptor, mode: PackedRequests((tokens,) * descriptor.num_tokens))
    for count, captured in ((1, 1), (2, 2), (3, 4)):
        images = torch.rand(count, *form)
        decision = prepared.dispatch(Batch(count, count))
        assert (decision.mode.name, decision.descriptor.num_tokens) == ("PIECEWISE", captured)
        metadata = PackedRequests((tokens,) * count)
        actual = prepared.run(decision, **{main: images}, metadata=metadata).last_hidden_state
        torch.testing.assert_close(actual, own(images).last_hidden_state, rtol=1e-4, atol=1e-5)


def test_model_is_compiled_with_its_own_inputs(compiled, own_model, monkeypatch):
    """(1, T) inputs, a decorated forward with keyword arguments, a ModelOutput; kept as a bundle.

    The decorators lead through modules that Dynamo names among the globals of one process.
    """
    use_text_compiler(monkeypatch)
    own = own_model("llama")
    arguments = {"input_ids": torch.arange(5)[None], "position_ids": torch.arange(5)[None]}
    inputs = {"input_ids": "int64[1, num_tokens]", "position_ids": "int64[1, num_tokens]"}
    settings = {"inputs": inputs, "splitting_ops": (SPLITTING_OP,), "compiler": "text"}
    ids, positions = torch.randint(64, (1, 7)), torch.arange(7)[None]
    expected = own(input_ids=ids, position_ids=positions, use_cache=False)
    for from_bundle in (False, True):
        made = compiled(adapt(copy.deepcopy(own)), examples=((), arguments), **settings)
        assert made.events.named("bundle.not_kept") == []
        assert made.compiled.from_bundle is from_bundle
        with forward_context(ForwardContext({}, PackedRequests((7,)))):
            result = made(input_ids=ids, position_ids=positions)
        assert type(result) is type(expected)
        assert list(result.keys()) == list(expected.keys())
        torch.testing.assert_close(result.last_hidden_state, expected.last_hidden_state)


def test_layers_of_the_engine_replace_the_default_attention(own_model):
    model = PackedModel(copy.deepcopy(own_model("llama")))
    seen = []

    def layer(query, key, value, output, rule, metadata):
        seen.append((tuple(query.shape), tuple(key.shape), rule.causal))
        attend_packed(query, key, value, output, rule, metadata)

    layers = {"layers.1.self_attn": layer}
    step(model, torch.arange(5), torch.arange(5), query_lens=(3,), layers=layers)
    assert seen == [((5, 4, 8), (5, 2, 8), True)]


def test_step_without_metadata_is_refused(own_model):
    model = PackedModel(copy.deepcopy(own_model("llama")))
    with forward_context(ForwardContext({})), pytest.raises(MissingMetadata):
        model(torch.arange(3), torch.arange(3))
