"""Units and tables."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from piecegraph.tools.tables import benchmark_tables, size, table


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
    Console(file=stream).print(table("t", ("a",), [("[bold]x[/bold]",)]))
    assert "[bold]x[/bold]" in stream.getvalue()


def test_a_benchmark_without_rows_still_shows_its_ratios():
    (ratios,) = benchmark_tables("b", {"rows": [], "ratios": {"a_over_b": 2.0}})
    assert ratios.title == "Ratios"
