"""Federated Probe-Logit Distillation: one language model from text that may not leave its sites.

`run` trains a federation and returns a `Run`, which has its loss, its rounds and its models:

    run = fpld.run("demo", out="runs/demo")
    run.loss
    run.generate("My fellow citizens")

`resume`, `check`, `plan`, `read_run` and `load_config` are what the commands of the same names sit on. `codecs`,
`rules`, `allocators` and `theory` are the parts of the method, and `registry` has all of them by name.

`import fpld` is light: a name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpld import codecs, registry, rules
    from fpld.api import Run, check, load_config, plan, read_run, resume, run
    from fpld.budget import allocators
    from fpld.codecs import decode, encode
    from fpld.config import Config
    from fpld.errors import BudgetError, FpldError, FrameError, InputError, MissingExtraError
    from fpld.federation.record import RoundRecord
    from fpld.paper import theory
    from fpld.protocol.wire import decode_frame, encode_frame
    from fpld.rules import combine
    from fpld.types import Decoded, Plan

__version__ = "0.2.0"

__all__ = [
    "BudgetError",
    "Config",
    "Decoded",
    "FpldError",
    "FrameError",
    "InputError",
    "MissingExtraError",
    "Plan",
    "RoundRecord",
    "Run",
    "allocators",
    "check",
    "codecs",
    "combine",
    "decode",
    "decode_frame",
    "encode",
    "encode_frame",
    "load_config",
    "plan",
    "read_run",
    "registry",
    "resume",
    "rules",
    "run",
    "theory",
]

# Where each name is defined; a module is listed under its own name.
_MODULES = {
    "fpld.api": ("Run", "check", "load_config", "plan", "read_run", "resume", "run"),
    "fpld.codecs": ("decode", "encode"),
    "fpld.config": ("Config",),
    "fpld.errors": ("BudgetError", "FpldError", "FrameError", "InputError", "MissingExtraError"),
    "fpld.federation.record": ("RoundRecord",),
    "fpld.protocol.wire": ("decode_frame", "encode_frame"),
    "fpld.rules": ("combine",),
    "fpld.types": ("Decoded", "Plan"),
}
_SUBMODULES = {
    "allocators": "fpld.budget.allocators",
    "codecs": "fpld.codecs",
    "registry": "fpld.registry",
    "rules": "fpld.rules",
    "theory": "fpld.paper.theory",
}
_DEFINED_IN = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name in _SUBMODULES:
        value: Any = import_module(_SUBMODULES[name])
    elif name in _DEFINED_IN:
        value = getattr(import_module(_DEFINED_IN[name]), name)
    else:
        raise AttributeError(f"module 'fpld' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
