"""Settings for all tests: no deadlines (the machine may be busy), the same examples on every machine."""

from hypothesis import settings

settings.register_profile("fpld", deadline=None, derandomize=True)
settings.load_profile("fpld")
