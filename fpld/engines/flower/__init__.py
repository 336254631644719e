"""The federation over Flower: a Strategy, a ServerApp, a ClientApp, a mod, and payloads. Needs `fpld[flower]`.

`examples/flower/` has an app of a few lines; `fpld aggregator` and `fpld node` need no knowledge of Flower. Names are
imported on first use, so that commands which start Flower's programs do not wait for its libraries.

- `client`, `server`, `strategy`, `simulation`: the apps.
- `messages`, `answer_schema`, `credentials`, `roster`: payloads and authentication.
- `site`: what a site keeps and how it answers. `launch`: the programs. `patches`: what is changed of Flower.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("flwr") is None:
    from fpld.errors import MissingExtraError

    raise MissingExtraError("the Flower engine", "flower")

if TYPE_CHECKING:
    from fpld.engines.flower.client import budget_guard, client_app
    from fpld.engines.flower.server import serve, server_app
    from fpld.engines.flower.site.config import Site, Terms, open_site
    from fpld.engines.flower.site.config import Site as Home
    from fpld.engines.flower.site.config import open_site as open_home
    from fpld.engines.flower.strategy import ProbeLogitDistillation

__all__ = [
    "Home",
    "ProbeLogitDistillation",
    "Site",
    "Terms",
    "budget_guard",
    "client_app",
    "open_home",
    "open_site",
    "serve",
    "server_app",
]
# Each public name, with the module and the name in it. `Home` and `open_home` are older names.
_NAMES = {
    "Home": ("site.config", "Site"),
    "ProbeLogitDistillation": ("strategy", "ProbeLogitDistillation"),
    "Site": ("site.config", "Site"),
    "Terms": ("site.config", "Terms"),
    "budget_guard": ("client", "budget_guard"),
    "client_app": ("client", "client_app"),
    "open_home": ("site.config", "open_site"),
    "open_site": ("site.config", "open_site"),
    "serve": ("server", "serve"),
    "server_app": ("server", "server_app"),
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _NAMES[name]
    return getattr(import_module(f"{__name__}.{module}"), attribute)
