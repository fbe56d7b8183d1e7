"""One engine and one server for all tests of the API: the engine's process takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # tests of the backend do without a web server
    from api_server import Api, House

houses: list[House] = []


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    """A file's servers end with it: idle ones go on looking, ten times a second, whether they should end."""
    yield
    for house in houses:
        house.close_servers()


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    from api_server import House

    from forked_python import fork_programs

    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        made = House(tmp_path_factory.mktemp("model"))
    houses.append(made)
    yield made
    made.close()


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A model that writes what it is told to, over a template that knows reasoning and tools."""
    import tiny_engine
    from api_server import REASONING_TEMPLATE, House

    from forked_python import fork_programs

    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        made = House(tmp_path_factory.mktemp("scripted"), REASONING_TEMPLATE, tiny_engine.scripted)
    houses.append(made)
    yield made
    made.close()


@pytest.fixture(scope="session")
def api(house: House) -> Api:
    """Open to anyone."""
    made = house.open()
    house.shared.append(house.opened.pop())
    return made
