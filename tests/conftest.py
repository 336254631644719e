"""Settings for all tests: no deadlines (the machine may be busy), the same examples on every machine."""

import os
from itertools import islice

# Before NumPy and PyTorch start, here and in what tests start: threads of several processes on the same cores wait for
# each other, and take ten times as long for small models.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("fpld", deadline=None, derandomize=True)
settings.load_profile("fpld")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each of several workers begin with slow tests, and end with quick ones, of which others can take some over.

    Every other worker begins with tests that wait for other processes, its neighbour with the longest of the others.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1:
        return
    kinds: dict[str, list[pytest.Item]] = {"waits": [], "long": [], "slow": [], "": []}
    for item in items:
        kinds[next((name for name in kinds if name and item.get_closest_marker(name)), "")].append(item)
    quick = iter(kinds[""])
    lanes = list[pytest.Item]()
    whole = len(items)
    for lane in range(workers):
        first = kinds["long" if lane % 2 else "waits"][lane // 2 :: (workers + 1 - lane % 2) // 2]
        start, end = (len(kinds["slow"]) * number // workers for number in (lane, lane + 1))
        share = [*first, *kinds["slow"][start:end]]
        size = (whole - len(lanes)) // (workers - lane)  # what pytest-xdist gives to this worker
        lanes += [*share, *islice(quick, max(size - len(share), 0))]
    items[:] = [*lanes, *quick]
