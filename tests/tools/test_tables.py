"""Units and tables."""

import io

import pytest
from rich.console import Console

from piecegraph.tools.report.sections import executable_lines, rich_table, size


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


def test_a_terminal_s_width_cuts_no_word_of_a_header():
    heads = ["way", "layers", "import torch", "ready", "trace", "compile", "libraries", "look up"]
    stream = io.StringIO()
    Console(file=stream, width=80).print(rich_table("t", heads, [[name * 3 for name in heads]]))
    text = stream.getvalue()
    for word in " ".join(heads).split():
        assert word in text


def test_executables_are_stated_by_mode_with_what_sharing_would_save():
    row = {"graphs": 6, "topologies": 2, "driver_bytes": 6144, "saved_bytes": 4096}
    (line,) = executable_lines({"FULL": row})
    assert line.startswith("FULL: 6 graphs of 2 topologies. The driver took 6.0 KiB;")
    assert line.endswith("would save 4.0 KiB.")
    assert executable_lines({}) == []
