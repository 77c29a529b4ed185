"""The explain page: its data, its forms, and how it looks in a browser."""

import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.tools.cli.app import main
from piecegraph.tools.cli.run_commands import explained
from piecegraph.tools.explain import explain, rendered
from piecegraph.tools.explain.advice import advise
from piecegraph.tools.explain.against import differences
from piecegraph.tools.explain.picture import HEAD, TAIL, _columns, _Value, picture
from piecegraph.tools.serve.options import read_run_options

SECTIONS = {
    *("warnings", "startup", "graph", "pieces", "guards", "cache"),
    *("mode", "captures", "dispatch", "padding", "settings"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The page, the JSON and the Markdown of one small run."""
    folder = tmp_path_factory.mktemp("explain")
    facts = explained(options())
    for name, form in (("page.html", "html"), ("json", "json"), ("md", "md")):
        (folder / name).write_text(rendered(facts, form))
    return folder


def options(**others):
    return read_run_options(
        model="layers=2,hidden=16,heads=2,vocab=32",
        requests=6,
        backend="eager",
        no_cache=True,
        capture_sizes="1,4,8",
        **others,
    )


class Page(HTMLParser):
    """What a test asks of a page: ids, links, tables, text, and anything fetched from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.fetched, self.text, self.open = set(), [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        facts = dict(attributes)
        self.ids.add(facts.get("id"))
        if tag == "a":
            self.links.append(facts["href"])
        if tag in ("script", "link", "img", "iframe", "object") or "src" in facts:
            self.fetched.append((tag, facts))
        if tag not in ("meta", "link", "path", "rect", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.compile
def test_the_page_is_whole_and_needs_nothing_from_elsewhere(written):
    text = (written / "page.html").read_text()
    page = Page(text)
    assert page.open == []
    assert not page.fetched
    assert "url(" not in text
    assert "@import" not in text
    assert page.ids >= {*SECTIONS, "main", "piece-0", "piece-1", "piece-2"}
    assert {link.removeprefix("#") for link in page.links} <= page.ids
    assert {f"#{section}" for section in SECTIONS} <= set(page.links)


@pytest.mark.compile
def test_two_explanations_are_compared(written, tmp_path, capsys):
    facts = json.loads((written / "json").read_text())
    other = json.loads((written / "json").read_text())
    assert differences(facts, other) == []
    other["settings"]["variants"]["max_loras"] = 4
    other["pieces"][1]["kernels"] = 3
    other["captures"][0]["captured"] = False
    other["timeline"][0]["seconds"] += 9
    other["graph_mode"]["resolved"] = "NONE"
    hit = {"key": "ab", "hit": True, "layer": "private", "bytes": 1}
    other["lookups"] = [{"kind": "bundle", "factors": {"torch": "2.99"}, **hit}]
    found = {(row["part"], row["what"]) for row in differences(facts, other)}
    digest = facts["pieces"][1]["digest"][:12]
    first = facts["captures"][0]
    assert found == {
        ("settings", "variants.max_loras"),
        ("keys", "torch"),
        ("pieces", f"{digest} (piece 1).kernels"),
        ("graph mode", "resolved"),
        ("capture plan", f"{first['mode']} {first['num_tokens']}.captured"),
        ("phases", facts["timeline"][0]["name"]),
    }
    (tmp_path / "rank1.json").write_text(json.dumps(other))
    files = ["--against", str(written / "json"), "--of", str(tmp_path / "rank1.json")]
    assert main(["explain", *files, "--format", "md", "--output", "-"]) == 0
    out = capsys.readouterr().out
    assert "| settings | variants.max_loras | 0 | 4 |" in out
    assert main(["explain", *files, "--output", str(tmp_path / "page.html")]) == 0
    assert Page((tmp_path / "page.html").read_text()).ids >= {"against"}
    assert main(["explain", "--against", str(tmp_path / "page.html")]) == 2


@pytest.mark.compile
@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.pop("guards"),
        lambda facts: facts["steps"][0].update(takes=1),
        lambda facts: facts.update(captures=None),
        lambda facts: facts["captures"][0].pop("segments"),
    ],
)
def test_a_file_whose_content_is_another_is_named(written, tmp_path, capsys, change):
    facts = json.loads((written / "json").read_text())
    change(facts)
    (tmp_path / "other.json").write_text(json.dumps(facts))
    for form in ("md", "html"):
        command = ["explain", "--of", str(tmp_path / "other.json"), "--format", form]
        assert main([*command, "--output", str(tmp_path / "page")]) == 2
        assert "invalid setting --of = " in capsys.readouterr().err
        assert not (tmp_path / "page").exists()


@pytest.mark.compile
def test_the_json_has_what_the_page_shows(written):
    facts = json.loads((written / "json").read_text())
    assert facts["graph_mode"]["resolved"] == "FULL_AND_PIECEWISE"
    assert [piece["used_by"] for piece in facts["pieces"]] == [[0], [1], [2]]
    assert all(piece["seconds"] > 0 for piece in facts["pieces"])
    kinds = [next(k for k in ("outer", "op", "piece") if k in step) for step in facts["steps"]]
    assert kinds == ["outer", "piece", "op", "piece", "op", "piece", "outer"]
    assert facts["steps"][1]["gives"]["t0"] == "float32[num_tokens, 16]"
    assert {row["num_tokens"] for row in facts["captures"]} == {1, 4, 8}
    counted = sum(n for row in facts["heat"]["rows"] for n in row["counts"])
    assert counted == facts["serving"]["steps"] == sum(row["count"] for row in facts["reasons"])
    names = [span["name"] for span in facts["timeline"]]
    assert {"prepare", "trace.dynamo", "split", "compile", "compile.piece", "capture"} <= set(names)
    assert not any("this start was cold" in advice["what"] for advice in facts["advice"])
    assert facts["schema"] == 2
    assert facts["machine"]["cpus"] >= 1
    assert names[:2] == ["import torch", "build model"]
    for index, span in enumerate(facts["timeline"]):
        if span["name"] == "prepare":
            end = span["start"] + span["seconds"]
            parts = [
                each["seconds"]
                for each in facts["timeline"][index + 1 :]
                if each["depth"] == span["depth"] + 1 and each["start"] <= end
            ]
            assert 0.3 * span["seconds"] < sum(parts) <= 1.01 * span["seconds"]


@pytest.mark.compile
def test_what_an_op_writes_is_what_it_gives(written):
    steps = json.loads((written / "json").read_text())["steps"]
    _, first, attention, second, *_ = steps
    (result,) = attention["gives"]
    assert "written by step" in result
    assert result in second["takes"]
    assert result.split(" ")[0] in first["gives"]


@pytest.mark.compile
def test_any_prepared_model_can_be_explained(small_config):
    import torch

    from piecegraph import Batch, prepare

    class Doubling(torch.nn.Module):
        def forward(self, x):
            return x * 2

    prepared = prepare(Doubling(), small_config(graph_mode="FULL", capture_sizes=(4,)))
    prepared.capture()
    prepared(torch.ones(3, 4), batch=Batch(3, 3))
    page = Page(explain(prepared))
    assert page.ids >= SECTIONS
    facts = json.loads(explain(prepared, "json"))
    assert facts["heat"]["rows"][2]["counts"] == [1]
    assert "## Capture plan" in explain(prepared, "md")
    prepared.close()


FINE = {
    "verification": {"ok": True},
    "remarks": {"uncovered": [], "steps": []},
    "settings": {"compile": True},
    "warnings": [],
    "cache": {"hit": True, "reason": None, "not_cacheable": []},
    "guards": [{"proved": True}],
    "policy": "check",
    "reasons": [{"mode": "FULL", "reason": "exact", "count": 10}],
    "padding": [{"mode": "FULL", "num_tokens": 4, "steps": 5, "share": 0.1}],
    "captures": [{"mode": "FULL", "captured": True, "steps": 3, "ms": 1.0}],
    "timeline": [
        {"name": "bundle.load", "start": 1.0, "seconds": 3.0},
        {"name": "import inductor", "start": 5.0, "seconds": 2.0},  # for another model
    ],
}
ABOVE = {"mode": "NONE", "reason": "above largest size", "count": 10}
PADDED = {"mode": "FULL", "num_tokens": 4, "steps": 50, "share": 0.5}


def test_advice_says_nothing_from_two_steps_or_of_a_cache_that_is_off():
    few = {"reasons": [ABOVE | {"count": 2}], "padding": [PADDED | {"steps": 2}], "captures": []}
    off = {"hit": False, "reason": "the cache is off", "not_cacheable": []}
    settings = {"compile": True, "cache": False}
    assert advise({**FINE, **few, "cache": off, "settings": settings}) == []


def test_advice_on_a_cold_start_is_what_helps_where_it_failed():
    cache = {"hit": False, "reason": "absent", "detail": "no bundle", "not_cacheable": []}
    (built,) = advise(FINE | {"cache": cache})
    assert "cache warm" in built["todo"]
    cache |= {"reason": "untrusted", "detail": "it is not signed", "remedy": "Sign it."}
    (signed,) = advise(FINE | {"cache": cache})
    assert signed == {
        "what": "this start was cold: untrusted: it is not signed",
        "todo": "Sign it.",
    }


@pytest.mark.compile
def test_the_markdown_has_a_table_a_section(written):
    text = (written / "md").read_text()
    for title in ("Warnings", "Startup", "Pieces", "Guards", "Capture plan", "Padding"):
        assert f"## {title}" in text
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        assert len({line.count(" | ") for line in table.splitlines()}) == 1


@pytest.mark.compile
def test_the_command_writes_a_page(tmp_path, capsys):
    small = ["--model", "layers=1,hidden=16,heads=2,vocab=32", "--requests", "1", "--off", "all"]
    page = tmp_path / "page.html"
    assert main(["explain", *small, "--output", str(page)]) == 0
    assert f"written: {page}" in capsys.readouterr().err
    assert "<html" in page.read_text()


@pytest.mark.compile
def test_pieces_that_are_not_compiled_are_not_called_loaded_and_no_bundle_is_advised():
    facts = explained(options(off=["compile"]))
    assert {piece["made"] for piece in facts["pieces"]} == {"not compiled"}
    assert not [advice for advice in facts["advice"] if "cold" in advice["what"]]


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="NO CHROMIUM: nobody looks at the explain page"
)


def chromium(page, folder, *arguments):
    """What headless Chromium prints of the page."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += ["--disable-sync", f"--user-data-dir={folder / 'profile'}", "--hide-scrollbars"]
    command += ["--window-size=1200,3000", *arguments, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, timeout=120, text=True).stdout


def screenshot(page, folder, *arguments):
    """The page as pixels, (height, width, 3) from 0 to 255."""
    import numpy as np
    from PIL import Image

    chromium(page, folder, f"--screenshot={folder / 'page.png'}", *arguments)
    with Image.open(folder / "page.png") as image:
        return np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.compile
@pytest.mark.slow
@needs_chromium
def test_the_page_looks_right_in_a_browser_light_and_dark(written, tmp_path):
    folders = [tmp_path / name for name in ("light", "dark")]
    for folder in folders:
        folder.mkdir()
    light = screenshot(written / "page.html", folders[0])
    dark = screenshot(written / "page.html", folders[1], "--force-dark-mode")
    assert light.shape == dark.shape == (3000, 1200, 3)
    assert light[5, 5].tolist() == [255, 255, 255]
    assert dark[5, 5].sum() < 150
    for pixels in (light, dark):
        background = (abs(pixels - pixels[5, 5]).sum(axis=2) > 30).mean()
        assert 0.02 < background < 0.6  # text and pictures, not a blank and not a filled page
    for color in ((207, 226, 255), (211, 242, 216), (255, 224, 194), (11, 87, 208)):
        assert (abs(light - color).sum(axis=2) < 6).sum() > 500  # three pieces, and the bars


WIDER = """<script>
const wider = [...document.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth);
const names = wider.map(e => e.getAttribute("aria-label"));
parent.postMessage([innerWidth, document.documentElement.scrollWidth, ...names].join(), "*");
</script></body>"""
"""Tells how wide a page is, and the names of what must be scrolled sideways."""


@pytest.mark.compile
@pytest.mark.slow
@needs_chromium
def test_the_page_fits_a_phone(written, tmp_path):
    """In a frame of 400 px: the window of a browser is not that narrow."""
    page = (written / "page.html").read_text()
    page = re.sub("<meta http-equiv=.Content-Security-Policy[^>]*>", "", page)
    inner = escape(page.replace("</body>", WIDER))
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<!doctype html><iframe width=400 height=3000 style="border:0" srcdoc="{inner}"></iframe>'
        "<script>onmessage = e => { document.title = e.data }</script>"
    )
    shown = chromium(outer, tmp_path, "--virtual-time-budget=5000", "--dump-dom")
    assert "<title>400,400,Picture of the split graph</title>" in shown
    assert "FULL_<wbr>AND_<wbr>PIECEWISE</b>" in page


def chain(length):
    """Steps piece, op, piece, … each of which takes what the one before gave, and the first's."""
    steps = []
    for index in range(length):
        takes = {f"t{index - 1}": "f[1]", "t0": "f[2]"} if index else {}
        kind = {"op": "ns::op.default"} if index % 2 else {"piece": min(index // 2, 1)}
        steps.append({**kind, "takes": takes, "gives": {f"t{index}": "f[1]"}})
    return steps


def test_equal_layers_are_folded():
    text = picture(chain(200))
    assert text.count("<rect") == 6  # two steps that differ, the first and the last turn
    assert "… the 2 steps above 97 more times …" in text
    Page(text)


def test_the_picture_of_a_long_chain_leaves_out_its_middle():
    steps = [{**step, "piece": n} for n, step in enumerate(chain(200))]
    for step in steps:
        step.pop("op", None)
    text = picture(steps)
    assert text.count("<rect") == HEAD + TAIL
    assert f"… {200 - HEAD - TAIL} more steps …" in text
    assert "200 steps" in text
    Page(text)


def test_text_in_the_picture_is_escaped():
    steps = [{"op": "<b>::&op", "takes": {}, "gives": {"t": "f[<i>]"}}]
    steps.append({"piece": 0, "takes": {"t": "f[<i>]"}, "gives": {}})
    text = picture(steps)
    assert "<b>" not in text
    assert "<i>" not in text


@given(
    st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(1, 10), min_size=1, max_size=3)))
)
def test_no_two_values_share_a_column_while_both_are_used(spans):
    values = [
        _Value(f"t{n}", "", start, tuple(sorted(start + length for length in lengths)))
        for n, (start, lengths) in enumerate(sorted(spans))
    ]
    columns = _columns(values)
    for one in values:
        for other in values:
            if one is not other and columns[one] == columns[other]:
                assert one.stops[-1] <= other.start or other.stops[-1] <= one.start


def test_advice_is_given_where_it_is_due_and_only_there():
    assert advise(FINE) == []
    slow = {"name": "import inductor", "start": 1.1, "seconds": 2.0}
    (advice,) = advise({**FINE, "timeline": [*FINE["timeline"], slow]})
    assert "2.0 s of the 3.0 s in `bundle.load`" in advice["what"]
    assert "compile_ahead" in advice["todo"]
    bad = {
        "verification": {"ok": False},
        "remarks": {"uncovered": [{"what": "no graph", "todo": "Add 24."}], "steps": []},
        "warnings": [{"event": "background.failed", "count": 1, "newest": [{"reason": "a"}]}],
        "cache": {"hit": False, "reason": "absent", "not_cacheable": []},
        "guards": [{"proved": False, "expression": "Eq(a, 1)", "where": "m.py:3"}],
        "reasons": [ABOVE],
        "padding": [PADDED],
        "captures": [
            {"mode": mode, "captured": True, "steps": steps, "ms": 1.0}
            for mode, steps in (("PIECEWISE", 3), ("PIECEWISE", 0))
        ],
    }
    assert len(advise(FINE | bad)) == 8
    assert {"what": "no graph", "todo": "Add 24."} in advise(FINE | bad)
    missed = {"remarks": {"steps": [{"what": "unstated", "todo": "State it."}]}}
    told = {each["what"] for each in advise(FINE | bad | missed)}
    assert "unstated" in told
    assert not any("never replayed" in what for what in told)
    for key, value in bad.items():
        assert len(advise({**FINE, key: value})) == 1
    no_full = {"mode": "FULL", "captured": True, "steps": 0, "ms": 1.0}
    assert advise({**FINE, "captures": [no_full, bad["captures"][0]]}) == []
