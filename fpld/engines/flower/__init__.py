"""The same federation over Flower: a Strategy, a ServerApp, a ClientApp, a mod, and payloads. Needs `fpld[flower]`.

An app of a few lines is in `examples/flower/`; who does not know Flower uses `fpld aggregator` and `fpld node`.
"""

try:
    import flwr as _flwr  # noqa: F401
except ImportError as error:
    from fpld.errors import MissingExtraError

    raise MissingExtraError("the Flower engine", "flower") from error

from fpld.engines.flower.client import client_app
from fpld.engines.flower.home import Home, Terms, open_home
from fpld.engines.flower.mods import budget_guard
from fpld.engines.flower.server import serve, server_app
from fpld.engines.flower.strategy import ProbeLogitDistillation

__all__ = [
    "Home",
    "ProbeLogitDistillation",
    "Terms",
    "budget_guard",
    "client_app",
    "open_home",
    "serve",
    "server_app",
]
