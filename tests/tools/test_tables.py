"""Units and tables."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from piecegraph.tools.report.sections import as_terminal, benchmark_section, rich_table, size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (3 * 2**40, "3072.0 GiB"),
    ],
)
def test_sizes_have_binary_units(num_bytes, text):
    assert size(num_bytes) == text


def test_cells_are_not_read_as_markup():
    stream = io.StringIO()
    Console(file=stream).print(rich_table("t", ("a",), [("[bold]x[/bold]",)]))
    assert "[bold]x[/bold]" in stream.getvalue()


def test_a_benchmark_without_rows_still_shows_its_ratios():
    (ratios,) = tables("b", {"rows": [], "ratios": {"a_over_b": 2.0}})
    assert ratios.title == "Ratios"


def tables(name, result):
    return as_terminal(benchmark_section(name, result))


def shown(*tables, width=80):
    stream = io.StringIO()
    Console(file=stream, width=width).print(*tables, sep="\n")
    return stream.getvalue()


def test_a_terminal_s_width_cuts_no_word_of_a_header():
    heads = ["way", "layers", "import torch", "ready", "trace", "compile", "libraries", "look up"]
    text = shown(rich_table("t", heads, [[name * 3 for name in heads]]))
    for word in " ".join(heads).split():
        assert word in text


def test_a_benchmark_shows_what_it_measured_to_three_digits():
    rows = [
        {"way": "a", "ready": 12.3456, "store": None},
        {"way": "b", "ready": 0.5, "store": None},
    ]
    first, _ = tables("b", {"rows": rows, "ratios": {}, "note": "modeled"})
    text = shown(first)
    assert "12.3 " in text
    assert "store" not in text
    assert "modeled" in text


def test_more_columns_than_fit_stand_below_each_other():
    row = {f"measure {n}": n for n in range(12)}
    text = shown(next(tables("b", {"rows": [{"way": "a", **row}], "ratios": {}})))
    assert all(name in text for name in row)


def test_a_benchmark_may_show_fewer_columns_than_it_measures():
    rows = [{"way": "a", "ready": 1.0, "split": 0.1}]
    result = {"rows": rows, "ratios": {}, "columns": ["way", "ready"]}
    assert "split" not in shown(next(tables("b", result)))
