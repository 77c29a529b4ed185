"""The adapter proves the class and configuration of a model before it serves it."""

import copy
import sys

import pytest
import torch

from piecegraph import Config
from piecegraph.errors import ModelNotAdaptable

transformers = pytest.importorskip("transformers")

from piecegraph.tools.integrations.transformers import (  # noqa: E402
    PackedModel,
    proof,
    routing,
    small,
)
from piecegraph.tools.integrations.transformers import adapt as adapt_function  # noqa: E402

from .families import assert_as_alone, results  # noqa: E402

adapt_module = sys.modules[adapt_function.__module__]

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

WIDTHS = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ENCODER = {**WIDTHS, "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 1}
UNKEPT = Config(cache=False)


def model_of(kind, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(kind(**settings), dtype=dtype).eval()


def roberta():
    return model_of(transformers.RobertaConfig, **ENCODER)


def llama4(floor_scale):
    return model_of(
        transformers.Llama4TextConfig, **{**WIDTHS, "num_hidden_layers": 4}, **HEADS,
        floor_scale=floor_scale, no_rope_layers=[1, 1, 1, 0], intermediate_size_mlp=48,
        num_local_experts=4, layer_types=["full_attention"] * 4,
    )  # fmt: skip


def esm():
    settings = {**ENCODER, "vocab_size": 1024, "mask_token_id": 1000}
    return model_of(transformers.EsmConfig, **settings, token_dropout=True)


def bloom(dtype=torch.float32):
    return model_of(transformers.BloomConfig, dtype, vocab_size=64, hidden_size=32, n_layer=2,
                    n_head=4)  # fmt: skip


def big_bird(attention_type="block_sparse"):
    return model_of(
        transformers.BigBirdConfig, **{**ENCODER, "max_position_embeddings": 1024},
        attention_type=attention_type, block_size=4,
    )  # fmt: skip


def packed(own):
    """A model of its own for steps, and the one that it must be equal to."""
    return PackedModel(copy.deepcopy(own), config=UNKEPT)


def assert_equal_to_alone(own, served, requests):
    assert_as_alone(own, requests, results(served, requests), atol=1e-4)


def ids(*lengths):
    return [torch.randint(3, 31, (length,)) for length in lengths]


def test_positions_are_those_of_the_models_own_forward():
    own = roberta()
    served = packed(own)
    assert (served.proof.offset, served.proof.padding) == (2, 1)
    assert_equal_to_alone(own, served, ids(3, 20, 1))


def test_scale_by_row_number_is_served_request_by_request():
    """Llama 4 scales queries of layers without rope by the row in the batch. A small copy has
    fewer layers with rope, and numbers that one otherwise."""
    own = llama4(64)
    served = packed(own)
    assert packed(llama4(8192)).layers.keys() == served.layers.keys()
    assert list(served.layers) == ["layers.3.self_attn"]
    assert "layers.3.self_attn" not in served.kv_shapes
    assert_equal_to_alone(own, served, ids(50, 60, 70))


def test_tokens_that_rescale_others_stay_in_their_request():
    own = esm()
    served = packed(own)
    assert list(served.layers) == ["embeddings"]
    masked = torch.tensor([5, 1000, 1000, 1000, 6])
    assert_equal_to_alone(own, served, [masked, *ids(9, 4)])


def test_model_that_requests_change_is_refused():
    """Block-sparse attention is switched off for good by the first short request."""
    with pytest.raises(ModelNotAdaptable, match="another result after it has seen others"):
        packed(big_bird())
    own = big_bird("original_full")
    assert_equal_to_alone(own, packed(own), ids(64, 96))


def test_error_far_into_a_row_is_at_most_twice_that_of_the_request_alone():
    """ALiBi adds the row number, which 16 bits round."""
    packed(bloom())
    refusal = r"in torch.bfloat16, .* from row 1024 .*self_attention \(BloomAttention\)"
    with pytest.raises(ModelNotAdaptable, match=refusal):
        packed(bloom(torch.bfloat16))


def test_result_in_16_bits_may_differ_by_what_the_proof_measured():
    own = model_of(transformers.RobertaConfig, torch.bfloat16, **ENCODER)
    kept = packed(own).proof
    assert 0.003 < kept.error < 0.03
    assert packed(roberta()).proof.error == 0.0
    expected = torch.ones(4, 8, dtype=torch.bfloat16)
    off = expected * (1 + 5 * (1 + proof.WORST) * kept.error)
    adapt_module._compare(own, off, expected)
    with pytest.raises(ModelNotAdaptable, match="another result than alone"):
        adapt_module._compare(own, off, expected, (1 + proof.WORST) * kept.error)


def test_proof_that_is_not_kept_is_an_event(caplog):
    """A class whose code refers to what no key can describe."""
    left = (each for each in ())

    class Own(transformers.RobertaModel):
        def forward(self, *args, **kwargs):
            assert next(left, None) is None
            return super().forward(*args, **kwargs)

    PackedModel(Own(roberta().config).eval(), config=UNKEPT)
    assert "proof.not_kept model=Own" in caplog.text


def test_proof_of_another_adapter_is_not_used(tmp_path, monkeypatch):
    config = Config(cache_dir=tmp_path)
    PackedModel(roberta(), config=config)
    other = proof.Requirements(offset=2, seconds=-1.0)
    monkeypatch.setattr(proof, "prove", lambda model: other)
    assert PackedModel(roberta(), config=config).proof != other
    monkeypatch.setattr(proof, "_own_code", lambda: "edited")
    assert PackedModel(roberta(), config=config).proof == other


class Lazy(torch.nn.Module):
    """Reads values only where a step has many tokens, as the trial has not."""

    def forward(self, x):
        return x if x.shape[1] < 100 or x.sum() == 0 else x + 0


class Reading(transformers.RobertaModel):
    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.encoder.layer[0].lazy = Lazy()
        self.encoder.layer[0].register_forward_hook(lambda m, args, out: m.lazy(out))


def test_values_that_long_steps_read_are_found():
    served = packed(Reading(roberta().config).eval())
    assert [type(mixer.module) for mixer in served.layers.values()] == [Lazy]


def test_proof_is_kept_for_a_class_and_configuration(tmp_path, monkeypatch):
    config = Config(cache_dir=tmp_path)
    first = PackedModel(roberta(), config=config).proof
    with monkeypatch.context() as patched:
        patched.setattr(proof, "prove", lambda model: pytest.fail("proved again"))
        assert PackedModel(roberta(), config=config).proof == first
    monkeypatch.setattr(proof, "prove", lambda model: proof.Requirements(offset=2, seconds=-1.0))
    other = model_of(transformers.RobertaConfig, **{**ENCODER, "num_attention_heads": 2})
    assert PackedModel(other, config=config).proof.seconds == -1.0


def test_special_token_at_the_end_of_a_vocabulary_does_not_keep_it_large():
    """Phi-4-mini pads with the last but few of 200,064 tokens."""
    config = transformers.Phi3Config(vocab_size=200064, pad_token_id=199999, bos_token_id=199999,
                                     eos_token_id=199999, num_hidden_layers=2)  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    *_, released = small.small_configs(model)
    assert (released.vocab_size, released.pad_token_id) == (small.VOCABULARY, 512)


def test_scores_that_few_heads_leave_equal_are_no_reason_to_refuse(monkeypatch):
    """An indexer of two heads leaves many scores 0, and rounding chooses among them."""
    made = []

    def refused(model, all_heads=False):
        made.append(all_heads)
        if not all_heads:
            raise routing.refusal(model, "of two heads")
        return proof.Requirements()

    monkeypatch.setattr(proof, "_proved", refused)
    assert proof.prove(roberta()).mixers == ()
    assert made == [False, True]


def gemma3n():
    """The layers and flags as released: 35 layers, of which the last 15 share keys and values."""
    return transformers.Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=64, intermediate_size=128,
        hidden_size_per_layer_input=16, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        laurel_rank=8,
    )  # fmt: skip


def test_small_copy_of_a_model_that_amplifies_rounding_is_calm():
    """Gemma 3n: a layer of each kind, and weights with which float32 is as exact as elsewhere."""
    config = gemma3n()
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    *_, released = small.small_configs(model)
    assert (released.num_hidden_layers, released.num_kv_shared_layers) == (9, 2)
    assert small.rounding(small.build(type(model), released)) > small.CALM
    assert small.rounding(small.build_calm(type(model), released)) < small.CALM


def test_model_that_is_too_sensitive_is_refused_as_such(monkeypatch):
    """No layer is named: what differs is rounding."""
    monkeypatch.setattr(proof, "rounding", lambda model: 1.0)
    with pytest.raises(ModelNotAdaptable, match="too sensitive to prove: float32 alone differs"):
        packed(esm())


class Chaotic(transformers.LlamaModel):
    """A wave of which bfloat16 leaves nothing. In steps of several requests it is negated there."""

    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        hidden = result.last_hidden_state
        turned = (200 * hidden).sin()
        if self.dtype == torch.bfloat16 and len(hidden[0]) > 130:
            turned = -turned
        return type(result)(last_hidden_state=turned)


def test_rounding_that_leaves_nothing_of_rows_proves_nothing():
    """Twice the error alone was a limit that negated results met."""
    config = transformers.LlamaConfig(**WIDTHS, **HEADS)
    proof.prove(Chaotic(config).eval())
    with pytest.raises(ModelNotAdaptable, match=r"in torch.bfloat16, it is too sensitive to prove"):
        proof.prove(Chaotic(config).to(torch.bfloat16).eval())


def test_most_rows_of_a_request_are_as_exact_as_alone():
    """One in ten may have another expert, chosen by rounding; a quarter may not be wrong."""
    alone = torch.linspace(0.01, 0.02, 40)

    def is_right(errors):
        return bool((errors <= proof.row_limits(errors, alone, torch.bfloat16)).all())

    assert is_right(alone.flip(0))
    assert is_right(torch.where(torch.arange(40) < 4, 0.5, alone))
    assert not is_right(torch.where(torch.arange(40) < 10, 0.5, alone))
    assert not is_right(3 * alone)
    assert not is_right(torch.full((40,), float("nan")))


def test_small_copy_has_the_flags_and_lengths_of_the_released_configuration():
    config = transformers.Gemma3TextConfig(
        vocab_size=262144, hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=1024,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    short, released = small.small_configs(model)
    assert (released.hidden_size, released.intermediate_size) == (160, 640)
    assert (released.num_attention_heads, released.num_key_value_heads) == (4, 2)
    assert released.layer_types == [config.layer_types[i] for i in (0, 1, 5)]
    assert (released.sliding_window, released.head_dim) == (1024, 256)
    assert released.max_position_embeddings == 131072
    assert (short.sliding_window, short.max_position_embeddings) == (16, 64)
    assert released.rope_parameters == config.rope_parameters
