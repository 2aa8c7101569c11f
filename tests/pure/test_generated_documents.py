"""Generated pages are those of the present docstrings and catalogue, and sources that are cited have a title."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        patch.delenv("WEFT_PATH", raising=False)
        spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["api.md", "answers.md"])
def test_a_page_is_current(name: str, generate: ModuleType) -> None:
    assert generate.PAGES[name]() == (DOCS / name).read_text(encoding="utf-8"), (
        f"docs/{name} is stale; run `{Path(sys.executable).name} docs/generate.py`"
    )


def test_every_public_name_has_a_contract() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert not re.findall(r"(?m)^- `[^`]*`$", text), "a property or field without a docstring"
    assert not re.findall(r"(?m)^(#{2,3} .*)\n\n```python\n(?:[^`]*)```\n\n(?=#)", text), "a function without one"
