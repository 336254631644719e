"""The same federation over Flower: a Strategy, a ServerApp, a ClientApp, a mod, and payloads. Needs `fpld[flower]`.

An app of a few lines is in `examples/flower/`; who does not know Flower uses `fpld aggregator` and `fpld node`. Names
are imported when they are asked for: commands that start Flower's programs do not wait for its libraries.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("flwr") is None:
    from fpld.errors import MissingExtraError

    raise MissingExtraError("the Flower engine", "flower")

if TYPE_CHECKING:
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
_MODULES = {
    "Home": "home",
    "ProbeLogitDistillation": "strategy",
    "Terms": "home",
    "budget_guard": "mods",
    "client_app": "client",
    "open_home": "home",
    "serve": "server",
    "server_app": "server",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
