"""Fixtures of the tests that start processes."""

from __future__ import annotations

import pytest

from weft.transport.messaging import Key


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Key:
    return Key.make(tmp_path_factory.mktemp("key") / "key")
