"""Units and tables."""

import io

import pytest
from rich.console import Console

from piecegraph.tools.report.sections import rich_table, size


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
