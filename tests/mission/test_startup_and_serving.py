"""What a start and a run report. From vLLM's startup log and benchmark figures."""


def test_a_start_names_its_phases(report):
    """vLLM: "torch.compile took …", "Graph capturing finished in …"."""
    startup = report["startup"]
    names = {phase["name"] for phase in startup["phases"]}
    assert any("trace" in name for name in names)
    assert any("capture" in name for name in names)
    assert startup["first_token_seconds"] > 0


def test_a_run_has_serving_figures(report):
    """vLLM: `benchmark_serving`: throughput, time to first token, inter-token latency."""
    assert report["serving"]["generated_tokens_per_second"] > 0
    assert report["latency"].keys() >= {"time_to_first_token", "inter_token", "step"}


def test_each_graph_has_its_time_and_memory(report):
    """vLLM: memory and seconds of graph capturing."""
    assert all({"ms", "memory"} & row.keys() for row in report["captures"])


def test_graphs_are_proved_while_serving(run):
    """piecegraph: steps run again uncompiled, from the same state."""
    shadow = run("--shadow", "1")["shadow"]
    assert shadow["wrong"] == []
    assert any(row["proved"] for row in shadow["graphs"])


def test_the_reference_engine_uses_both_modes(report):
    """vLLM: `FULL_AND_PIECEWISE` is the default."""
    assert {row["mode"] for row in report["dispatch"]} >= {"FULL"}
