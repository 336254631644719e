"""Settings for all tests: no deadlines (the machine may be busy), the same examples on every machine."""

import os

# Before NumPy and PyTorch start, here and in what tests start: threads of several processes on the same cores wait for
# each other, and take ten times as long for small models.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("fpld", deadline=None, derandomize=True)
settings.load_profile("fpld")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that wait for other processes: the rest keeps the processors busy meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)
