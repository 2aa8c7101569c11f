"""The site of the documentation. Its source folder is the root of the repository, so that every link of a page works
both on the site and where the repository is browsed: `make docs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import weft

project = "Weft"
version = release = weft.__version__
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"Weft {version}"
html_show_copyright = False
html_copy_source = False
html_last_updated_fmt = None


def setup(app: Any) -> None:
    app.connect("build-finished", _entry)


def _entry(app: Any, failure: Exception | None) -> None:
    """The site's entry leads to its landing page."""
    if failure is None and app.builder.name == "html":
        entry = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><title>Weft</title>\n'
        (Path(app.outdir) / "index.html").write_text(entry, encoding="utf-8")
