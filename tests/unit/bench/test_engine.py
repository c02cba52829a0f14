"""The engine question needs somebody to compare with."""

import importlib.util
from pathlib import Path

import pytest

from bench.engine import measure
from bench.report import Skipped


async def test_without_transformers_it_is_skipped_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Skipped, match="pip install"):
        await measure(Path("unused"), "auto", "none", 1, 1)
