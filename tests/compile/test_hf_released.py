"""What released models have: the result of each request is that of the model's own forward."""

import copy
from pathlib import Path

import pytest
import torch

from piecegraph import Batch, Config, ReplayBackend, prepare
from piecegraph.errors import ModelNotAdaptable

transformers = pytest.importorskip("transformers")

from piecegraph.tools.integrations.transformers import (  # noqa: E402
    SPLITTING_OP,
    PackedModel,
    PackedRequests,
    adapt,
    proof,
    settle_rope,
)
from piecegraph.tools.integrations.transformers.paged import paged_layers  # noqa: E402
from piecegraph.tools.integrations.transformers.small import build_calm, small_configs  # noqa: E402
from tests.processes import PYTHON, output_of  # noqa: E402

from . import families, released_table  # noqa: E402
from .families import assert_as_alone, positions_of, results  # noqa: E402
from .test_proof import gemma3n  # noqa: E402

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]


def one_and_heavy(often, *names):
    """Cases of which all but one are heavy."""
    return [pytest.param(n, marks=[pytest.mark.heavy] * (n != often)) for n in names]


LENGTHS = (3, 40, 1, 9)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "pad_token_id": 0,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
T5 |= {"relative_attention_max_distance": 16, "num_decoder_layers": 1}


def drawn(model):
    """`model` with weights of which none is zero."""
    torch.manual_seed(0)
    for parameter in model.requires_grad_(False).parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model.eval()


def served(model, **settings):
    """`model` prepared for steps of at most 4 requests, with graphs where `capture_sizes` are."""
    given = {**model.settings, "max_num_tokens": 128, "max_num_reqs": 4, "compiler": "eager"}
    given["graph_mode"] = "PIECEWISE" if "capture_sizes" in settings else "NONE"
    config = Config(**{**given, **settings}, cache=False)
    prepared = prepare(model, config, layers=model.layers, backend=ReplayBackend())
    prepared.capture(lambda descriptor, mode: PackedRequests((descriptor.num_tokens,)))
    return prepared


def step(prepared, requests, *more):
    """The decision for a step over requests, and the result of each."""
    lengths = tuple(map(len, requests))
    decision = prepared.dispatch(Batch(sum(lengths), len(lengths)))
    inputs = torch.cat(requests), positions_of(lengths), *more
    result = prepared.run(decision, *inputs, metadata=PackedRequests(lengths))
    return decision, result.split(lengths)


def prepared_results(model, requests):
    """As `results`, traced."""
    return step(served(model), requests)[1]


def captured_results(model, requests):
    """As `results`, of a step in a PIECEWISE graph."""
    decision, found = step(served(model, max_num_tokens=64, capture_sizes=(64,)), requests)
    assert decision.mode.name == "PIECEWISE"
    return found


def assert_equal_alone(own, lengths=LENGTHS, run=results, **settings):
    """Each request of a step has the result of the model's own forward for it alone."""
    model = PackedModel(copy.deepcopy(own), **settings)
    requests = [torch.randint(3, 60, (length,)) for length in lengths]
    assert_as_alone(own, requests, run(model, requests))
    return model


def longrope(**settings):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    limits = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    config = transformers.Phi3Config(**SIZES, **limits, rope_parameters=rope, **settings)
    return drawn(transformers.Phi3Model(config))


def test_longrope_has_the_factors_of_what_is_served():
    own = longrope()
    assert_equal_alone(own, (3, 20, 32), max_model_len=32)
    model = assert_equal_alone(own, (33, 60))
    settled = copy.deepcopy(own)
    settle_rope(settled)
    requests = [torch.arange(3, 9)]
    assert_as_alone(settled, requests, results(model, requests))
    short = copy.deepcopy(own)
    settle_rope(short)
    settle_rope(short, 32)
    ids = torch.arange(3, 9)[None]
    torch.testing.assert_close(short(input_ids=ids)[0], own(input_ids=ids)[0])


@pytest.mark.parametrize(
    "rope_type", [pytest.param("default", marks=pytest.mark.heavy), "longrope"]
)
def test_frequencies_that_a_forward_makes_in_each_call_are_made_once(rope_type):
    """Phi-3.5-MoE: on the host, which no graph can hold, and scaled by a value of a tensor."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
        rope |= {"short_mscale": 1.25, "long_mscale": 1.5, "original_max_position_embeddings": 32}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.PhimoeConfig(
        **SIZES, **experts, max_position_embeddings=64, rope_parameters=rope
    )
    own = drawn(transformers.PhimoeModel(config))
    assert_equal_alone(own, (3, 20, 32), captured_results, max_model_len=32)
    if rope_type == "longrope":
        assert_equal_alone(own, (40,), captured_results)


GEMMA4 = {
    **SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "vocab_size_per_layer_input": 64, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
GEMMA4_SHAPES = {
    "shared keys": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
                    "use_double_wide_mlp": True},
    "keys are values": {"hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1,
                        "attention_k_eq_v": True},
    "experts": {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
                "moe_intermediate_size": 16, "top_k_experts": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "run"),
    [
        ("shared keys", results),
        *(pytest.param(s, prepared_results, marks=pytest.mark.heavy) for s in GEMMA4_SHAPES),
    ],
)
def test_layers_have_values_of_their_own(shape, run):
    """The configuration raises where a value of a layer is read as that of the model."""
    config = transformers.Gemma4TextConfig(**GEMMA4, **GEMMA4_SHAPES[shape])
    own = drawn(transformers.Gemma4TextModel(config))
    model = assert_equal_alone(own, run=run)
    assert {key_dim for _, key_dim, _ in model.kv_shapes.values()} == {8, 16}
    for small in small_configs(own):
        layers = [(each.head_dim, each.num_key_value_heads) for each in small.per_layer_config]
        kinds = {"sliding_attention": layers[0], "full_attention": layers[1]}
        assert layers == [kinds[kind] for kind in small.layer_types]
        assert len(set(layers)) == 2


def test_an_error_of_the_model_is_one_of_ours():
    own = longrope()
    own.layers[1].mlp.forward = lambda hidden: {}["missing"]
    with pytest.raises(ModelNotAdaptable, match=r"KeyError at .*test_hf_released.py:\d+: 'miss"):
        PackedModel(own)
    with pytest.raises(ModelNotAdaptable, match="(?s)TypeError at .* can be prepared without"):
        adapt(longrope(), {"input_ids": 3})


def test_dynamic_rope_has_the_frequencies_of_the_longest_request():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=32, rope_parameters=rope)
    own = drawn(transformers.LlamaModel(config))
    assert_equal_alone(own, (3, 20, 32), prepared_results)
    assert_equal_alone(own, (50,), max_model_len=50)


def test_attention_on_both_sides_with_a_window():
    """EmbeddingGemma: masks that are joined by `or`."""
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        use_bidirectional_attention=True,
        sliding_window=12,
        layer_types=kinds,
    )
    assert not assert_equal_alone(drawn(transformers.Gemma3TextModel(config))).layers


@pytest.mark.heavy
@pytest.mark.parametrize("run", [results, prepared_results])
def test_layers_whose_sparsity_dynamo_cannot_trace_are_mixers(run, monkeypatch):
    """Gemma 3n as released: 10 of 35 layers ask a distribution for a threshold, which reads its
    arguments on the host, until Dynamo turns that off in its process."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    own = build_calm(transformers.Gemma3nTextModel, gemma3n())
    model = PackedModel(copy.deepcopy(own), config=Config(cache=False))
    assert list(model.layers) == [f"layers.{i}.mlp" for i in range(10)]
    requests = [torch.randint(3, 60, (length,)) for length in LENGTHS]
    assert_as_alone(own, requests, run(model, requests), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", one_and_heavy("UMT5", "T5", "UMT5"))
def test_position_bias_is_an_argument_of_the_op(name):
    whole = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**T5))
    own = drawn(whole.get_encoder())
    model = assert_equal_alone(own)
    with pytest.raises(ModelNotAdaptable, match="adds a bias for each pair"):
        paged_layers(model, num_blocks=2, block_size=4, dtype=torch.float32)
    encoder = getattr(transformers, f"{name}EncoderModel")(own.config)  # it is no decoder
    assert PackedModel(encoder).settings["splitting_ops"] == (SPLITTING_OP,)


@pytest.mark.parametrize("family", one_and_heavy("bart", "bart", "marian", "pegasus"))
def test_encoders_of_encoder_decoders(family):
    """What the refusal advises. They count their rows for positions: of a tensor, or as a size."""
    config = families.tiny_config(family)
    own = drawn(transformers.AutoModel.from_config(config, attn_implementation="eager"))
    with pytest.raises(ModelNotAdaptable, match=r"Adapt its encoder: model\.get_encoder\(\)"):
        PackedModel(own)
    assert list(assert_equal_alone(own.get_encoder()).layers) == ["embed_positions"]


@pytest.mark.parametrize("family", one_and_heavy("jetmoe", "longcat_flash", "jetmoe"))
def test_layers_that_read_values_on_the_host(family):
    """Loops over the experts that are used: mixers, since they cannot be traced."""
    own = drawn(families.own_model(family))
    model = assert_equal_alone(own)
    kinds = {type(each.module).__name__ for each in model.layers.values()}
    assert kinds in ({"LongcatFlashExperts"}, {"JetMoeDecoderLayer"})


def test_memory_for_the_results_of_two_ops_is_no_result_of_mixed_rows():
    """JetMoE has nothing but mixers between two ops: both results are allocated in one piece."""
    model = PackedModel(drawn(families.own_model("jetmoe")))
    prepared = served(model, max_num_tokens=16, capture_sizes=(8, 16))
    assert not prepared.events.named("rows_mixed")


@pytest.mark.parametrize("family", one_and_heavy("mixtral", "mixtral", "qwen3_moe", "llama4_text"))
def test_steps_of_experts_are_padded_in_float32(family):
    """Rows are grouped by expert inside of one layer: what leaves a piece are rows of tokens."""
    own = drawn(families.own_model(family))
    model = PackedModel(copy.deepcopy(own))
    prepared = served(model, max_num_tokens=16, capture_sizes=(8, 16))
    requests = [torch.randint(3, 60, (length,)) for length in (3, 6)]
    decision, found = step(prepared, requests)
    assert (decision.mode.name, decision.descriptor.num_tokens) == ("PIECEWISE", 16)
    assert_as_alone(own, requests, found)
    assert not prepared.events.named("rows_mixed")


def test_nothing_inside_is_equal_to_nothing():
    assert proof._equal(torch.ones(0, 3), torch.zeros(0, 3))


@pytest.mark.parametrize(
    "family",
    one_and_heavy("glm_moe_dsa", "deepseek_v32", "glm_moe_dsa", "deepseek_v4", "hy_v4", "axk2"),
)
def test_keys_that_an_indexer_selects(family):
    """Top-k of each request: one that has more tokens than that, behind and before others."""
    config = families.tiny_config(family)
    config.index_topk = 16 if family == "deepseek_v32" else 4
    if family == "glm_moe_dsa":
        config.indexer_types = ["full", "shared"]
    own = drawn(transformers.AutoModel.from_config(config, attn_implementation="eager"))
    model = assert_equal_alone(own)
    mixers = (mixer for mixer in model.layers.values() if not mixer.by_row)
    kinds = {type(mixer.module).__name__ for mixer in mixers}
    assert kinds in (
        {"DeepseekV32Indexer"}, {"GlmMoeDsaIndexer"}, {"DeepseekV4Attention"}, {"HYV4Indexer"},
        {"AXK2Indexer"},
    )  # fmt: skip
    config.index_topk = 64
    ids = torch.randint(3, 60, (1, 40))
    dense = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    dense.load_state_dict(own.state_dict())
    assert not torch.allclose(dense(input_ids=ids)[0], own(input_ids=ids)[0], atol=1e-3)


def test_heads_run_for_each_request_and_token_types_are_an_input():
    """A cross-encoder of BERT: pooler and classifier of each request."""
    config = transformers.BertConfig(**SIZES, num_labels=3)
    own = drawn(transformers.BertForSequenceClassification(config))
    model = PackedModel(copy.deepcopy(own))
    inputs = {**model.settings["inputs"], "token_type_ids": "int64[num_tokens]"}
    requests = torch.randint(3, 60, (12,)).split((5, 7))
    types = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 1, 1, 1, 1, 1])
    _, hidden = step(served(model, inputs=inputs), requests, torch.cat(types))
    heads = model.own_head(torch.cat(hidden), torch.cat(requests), (5, 7))
    for result, ids, kinds in zip(heads, requests, types, strict=True):
        expected = own(input_ids=ids[None], token_type_ids=kinds[None])
        torch.testing.assert_close(result.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_a_head_that_takes_more_than_hidden_states_is_refused():
    """ALBERT pools inside of its base model, in another form than others."""
    sizes = {**SIZES, "embedding_size": 16, "num_labels": 3}
    own = drawn(transformers.AlbertForSequenceClassification(transformers.AlbertConfig(**sizes)))
    with pytest.raises(ModelNotAdaptable, match=r"Adapt the base model, model\.base_model"):
        PackedModel(own)
    assert PackedModel(own.base_model).own_head is None


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", ["FacebookAI/roberta-base", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"]
)
def test_released_configuration_is_warm_in_a_second_process_and_beside_another(name, tmp_path):
    """In bfloat16, as a row of the table: its proof, its steps, a second process, and one in which
    another family was built before."""
    folders = []
    for each in ("HuggingFaceTB/SmolLM2-135M", name):
        folder = tmp_path / str(len(folders))
        folder.mkdir(mode=0o700)
        code = f"released_table.cold({each!r}, 'bfloat16', 'text', folder)['outcome']"
        assert in_a_process(code, folder) == "equal"
        folders.append(folder)
    assert in_a_process("released_table.hit(folder)", folders[1]) == "True"
    beside = in_a_process(f"released_table.beside([Path({str(folders[0])!r}), folder])", folders[1])
    assert beside == "[True, True]"


def test_the_command_of_the_page_is_there(monkeypatch, capsys):
    root = Path(__file__).parents[2]
    module = Path(released_table.__file__).relative_to(root).with_suffix("").as_posix()
    command = f"`python -m {module.replace('/', '.')} RESULTS.json`"
    assert command in (root / "docs/families.md").read_text()
    monkeypatch.setattr("sys.argv", ["released_table", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        released_table.main()
    assert "RESULTS" in capsys.readouterr().out.upper()


def in_a_process(expression, folder):
    """The text of what a function of the table gives in a process of its own."""
    program = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from pathlib import Path\n"
        "from tests.compile import released_table\n"
        "released_table.compilers.entry_points = lambda group: [released_table.EntryPoint()]\n"
        f"folder = Path({str(folder)!r})\n"
        f"print('result', {expression})"
    )
    root = Path(__file__).parents[2]
    return output_of(PYTHON, "-c", program, cwd=root).rpartition("result ")[2].strip()
