"""The small federation of `tests/federation`, for faults."""

from tests.federation.conftest import config_file

__all__ = ["config_file"]
