"""The trace reader: what it reads, and that it names the line it cannot read."""

import pytest

from piecegraph.errors import ConfigError, TraceUnreadable
from piecegraph.tools.serve.trace import EXCERPT, TraceRow, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
GOOD = "2023-11-16 18:15:46.6805900,374,44"


def write(tmp_path, *lines):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([HEADER, *lines, ""]))
    return path


def test_the_shipped_excerpt_is_a_thousand_requests():
    rows = read_trace(EXCERPT, limit=1000)
    assert rows[0] == TraceRow(0.0, 374, 44)
    assert rows[1] == TraceRow(pytest.approx(4.314579), 396, 109)
    assert len(rows) == 1000


def test_lengths_are_scaled_and_never_vanish(tmp_path):
    path = write(tmp_path, GOOD, "2023-11-16 18:15:47,1,1")
    rows = read_trace(path, limit=2, length_scale=0.05)
    assert [(row.num_prompt, row.num_generate) for row in rows] == [(19, 3), (1, 1)]


def test_only_the_requests_asked_for_are_read(tmp_path):
    assert len(read_trace(write(tmp_path, GOOD, "nonsense"), limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2023-11-16 18:15:47,1", "it has 2 cells"),
        ("2023-11-16 18:15:47,1,2,3", "it has 4 cells"),
        ("yesterday,1,2", "'yesterday' is not a time"),
        ("2023-11-16 18:15:47,many,2", "ContextTokens 'many'"),
        ("2023-11-16 18:15:47,1,0", "GeneratedTokens '0'"),
        ("2023-11-16 18:15:47,-1,2", "ContextTokens '-1'"),
        ("2023-11-16 18:15:47,1.5,2", "ContextTokens '1.5'"),
        ("2023-11-16 18:15:47,²,2", "ContextTokens"),
        (f"2023-11-16 18:15:47,{'9' * 5000},2", "ContextTokens"),
        ("2023-11-16 18:15:45,1,2", "before the row above it"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, reason):
    with pytest.raises(TraceUnreadable, match=r"trace\.csv .* line 3: ") as caught:
        read_trace(write(tmp_path, GOOD, line), limit=2)
    assert reason in str(caught.value)


def test_another_files_header_is_line_1(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(TraceUnreadable, match="line 1: "):
        read_trace(path, limit=1)


def test_blank_lines_count_as_lines_only(tmp_path):
    with pytest.raises(TraceUnreadable, match="line 4: "):
        read_trace(write(tmp_path, GOOD, "", "x"), limit=2)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b""])
def test_what_is_no_text_file_is_an_error_of_the_setting(tmp_path, content):
    path = tmp_path / "trace.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"trace\.csv"):
        read_trace(path, limit=1)


def test_a_folder_is_not_a_trace(tmp_path):
    with pytest.raises(TraceUnreadable, match="directory"):
        read_trace(tmp_path, limit=1)


def test_a_trace_with_too_few_requests_says_so(tmp_path):
    with pytest.raises(TraceUnreadable, match="1 of the 5 requests"):
        read_trace(write(tmp_path, GOOD), limit=5)
