from collections.abc import Iterator

import pytest
from scripted_router import ScriptedRouter, serve_scripted


@pytest.fixture
def served() -> Iterator[tuple[ScriptedRouter, str]]:
    with serve_scripted() as served:
        yield served


@pytest.fixture
def router(served: tuple[ScriptedRouter, str]) -> ScriptedRouter:
    return served[0]


@pytest.fixture
def address(served: tuple[ScriptedRouter, str]) -> str:
    return served[1]
