"""The grammar of bucket files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.dispatch import Bucket, Phase
from piecegraph.errors import BucketFileInvalid
from piecegraph.tools.engine.bucket_file import read_buckets


def test_a_line_means_all_its_combinations():
    text = """
    # prompts
    (1, 128, 0)
    (range(1, 4), [128, 256], 0)   # six
    ([1, 2], 1, range(4, 0, -2))
    (1, 128, 0)
    """
    buckets = read_buckets(text.splitlines())
    assert [b for b in buckets if b.phase is Phase.DECODE] == [
        (1, 1, 2), (1, 1, 4), (2, 1, 2), (2, 1, 4)
    ]  # fmt: skip
    prompts = [b for b in buckets if b.phase is Phase.PROMPT]
    assert prompts == [Bucket(b, q, 0) for b in (1, 2, 3) for q in (128, 256)]


def test_every_bad_line_is_reported_at_once():
    lines = [
        "(1, 128, 0)",
        "(1, 128)",
        "1, 128, 0",
        "(1, 128, x)",
        "(1, 128, range(0, 5, 0))",
        "(1, 128, range(0, 10001))",
        "(1, range(3, 3), 0)",
        "(0, 128, 0)",
        "(1, 128, -1)",
        "(1, 128.0, 0)",
        "(1, True, 0)",
        "(1, 128, 0",
        "__import__('os').system('true')",
        "(1, 128, range(1, stop=3))",
        "(1, 128, [range(1, 3)])",
    ]
    with pytest.raises(BucketFileInvalid) as caught:
        read_buckets(lines, source="buckets.txt")
    bad = {line.number: line.reason for line in caught.value.facts["lines"]}
    assert sorted(bad) == [2, *range(4, 16)]
    assert "step of 0" in bad[5]
    assert "10001 values" in bad[6]
    assert "batch 0 is below 1" in bad[8]
    assert "buckets.txt" in str(caught.value)
    assert "line 12" in str(caught.value)


@given(st.text(max_size=40))
def test_no_line_crashes_the_reader(line):
    try:
        buckets = read_buckets([line])
    except BucketFileInvalid:
        return
    assert all(isinstance(bucket, Bucket) for bucket in buckets)
