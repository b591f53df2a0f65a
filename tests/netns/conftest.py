"""The two hosts, shared by the tests of this folder."""

from collections.abc import Iterator

import pytest

from kvik.roles.hosts import CannotError
from tests.netns.hosts import Host, two_hosts


@pytest.fixture(scope="session")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts; the tests are skipped, by name, where none can be made."""
    try:
        with two_hosts() as made:
            yield made
    except CannotError as cannot:
        pytest.skip(str(cannot))
