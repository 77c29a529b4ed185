"""Explains one startup and run: as a page, as Markdown, as JSON. See docs/explain.md."""
