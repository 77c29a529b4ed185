"""Hook of mkdocs: pages from outside of docs/ are in the site, and links lead to them."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
ADDED = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Where a page of the repository is in the site."""

_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for source, target in ADDED.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to where a page is in the site; other files to `repo_url`, or named without it."""
    inside = {target: source for source, target in ADDED.items()}
    source = inside.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def led(link: re.Match[str]) -> str:
        text, place, anchor = link.groups()
        path = normpath((Path(source).parent / place).as_posix())
        target = ADDED.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(target):
            return f"{text}({target}{anchor or ''})"
        if not (ROOT / path).exists():
            return link[0]  # a broken link: mkdocs says so, and the build fails
        if config.repo_url:
            return f"{text}({config.repo_url.rstrip('/')}/blob/main/{path})"
        return text.strip("[]") if path in text else f"{text.strip('[]')} (`{path}`)"

    return _LINK.sub(led, markdown)
