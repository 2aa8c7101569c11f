"""Writes the generated pages, `api.md` and `answers.md`: `python docs/generate.py`."""

from __future__ import annotations

from pathlib import Path

from _answers import answers
from _api import api

PAGES = {"api.md": api, "answers.md": answers}


def main() -> None:
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
