"""Settings for all tests: no deadlines (the machine may be busy), the same examples on every machine."""

import pytest
from hypothesis import settings

settings.register_profile("fpld", deadline=None, derandomize=True)
settings.load_profile("fpld")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that wait for other processes: the rest keeps the processors busy meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)
