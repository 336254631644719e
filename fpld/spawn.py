"""Worker processes of scripts and notebooks: what they define is known there, and no script needs a main guard.

Python's own `spawn` imports the main script in each process before anything else. A script that trains at its top level
would train again in each worker. Here a process starts without the script:

    parent   `spawn_context` starts processes that know nothing of the main script
             `Origin.of_this_process` names that script, and holds what was registered, pickled
    child    `Origin.restore` imports the script, up to its first call of `fpld.run`, and registers what is missing

So codecs and students that a script defines before it runs are there, with or without a main guard. Without one, what
stands before the run is done again in each worker, and the run's place is left as by an exception. What a notebook
defines has no file: no process can import it, and `unreachable` says so before a run begins.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import pickle
import sys
import threading
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.spawn import get_preparation_data
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from fpld.registry import REGISTRIES
from fpld.validation import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fpld.registry import Registry

log = logging.getLogger(__name__)

REMEDY = "define it in a module (a .py file) and import that, or set engine.workers = 0"
_IMPORTED_MAIN = "__mp_main__"  # as Python's own spawn names it: a main guard is false there
_starting = threading.Lock()
_importing_main = False


class _RunReached(BaseException):
    """A worker that imports the main script has come to the run of which it is a part."""


class _Process(SpawnProcess):
    """A process that does not import the main script of its parent."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - the name of the base class
        with _hidden_main():
            return SpawnProcess._Popen(process_obj)


class _Context(SpawnContext):
    Process = _Process


def spawn_context() -> SpawnContext:
    """Return a context whose processes begin with nothing of this one."""
    return _Context()


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Let the main module have no file and no name, by which a process that is started would import it."""
    main = sys.modules["__main__"]
    with _starting:
        hidden: dict[str, Any] = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
        vars(main).pop("__file__", None)
        main.__spec__ = None
        try:
            yield
        finally:
            vars(main).update(hidden)


class Registration(NamedTuple):
    """What a script has registered: of which extension point, its name, and itself, pickled."""

    kind: str
    name: str
    item: bytes


@dataclass(frozen=True, slots=True)
class Origin:
    """What a worker must know of its parent: the main script, by its module or its file, and what was registered."""

    module: str | None
    file: str | None
    registrations: tuple[Registration, ...]

    @classmethod
    def of_this_process(cls) -> Origin:
        """Describe this process."""
        module, file = _main_script()
        registered = ((registry.kind, *pair) for registry in REGISTRIES for pair in registry.registered().items())
        picked = tuple(
            Registration(kind, name, pickle.dumps(item)) for kind, name, item in registered if unreachable(item) is None
        )
        return cls(module, file, picked)

    def restore(self) -> None:
        """Import the main script up to its run, and register what is missing; what fails is a warning in the log."""
        global _importing_main
        _importing_main = True
        try:
            with redirect_stdout(io.StringIO()):  # the script has written it already
                _import_as_main(self.module, self.file)
        except (_RunReached, SystemExit):
            pass
        except Exception as error:  # whatever a script raises
            log.warning("a worker process cannot import %s: %s", self.module or self.file, printable(error))
        finally:
            _importing_main = False
        for kind, name, item in self.registrations:
            registry: Registry[Any] = next(each for each in REGISTRIES if each.kind == kind)
            if name in registry:
                continue
            try:
                registry.register(name, pickle.loads(item))  # noqa: S301 - from the parent, as all that a worker gets
            except Exception as error:  # whatever its module raises
                log.warning("a worker process cannot import the %s %r (%s): %s", kind, name, printable(error), REMEDY)


def stop_before_run() -> None:
    """Return, unless this process is a worker that imports the main script and has come to the run."""
    if _importing_main:
        raise _RunReached


def unreachable(item: Any) -> str | None:
    """Return why worker processes cannot import what was registered; None if they can.

    >>> unreachable(len) is None
    True
    """
    try:
        pickle.dumps(item)
    except Exception as error:  # whatever an object raises when it is pickled
        return f"it cannot be pickled ({printable(error)})"
    module = getattr(item, "__module__", None) or type(item).__module__
    if module == "__main__" and _main_script() == (None, None):
        return "it is defined in a notebook or an interactive session"
    return None


def _main_script() -> tuple[str | None, str | None]:
    """Return the name of the main module, or its file; neither in a notebook."""
    data = get_preparation_data("")
    module = data.get("init_main_from_name")
    if module is not None and module.rpartition(".")[2] == "__main__":  # a package, which has no main guard
        return None, None
    file = data.get("init_main_from_path")
    return module, file if file is not None and Path(file).is_file() else None


def _import_as_main(module: str | None, file: str | None) -> None:
    """Import the main script under the name that it has in child processes.

    The main module is described as in the parent: processes that the worker starts itself find the script by that.
    """
    if module is not None:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.loader is None:
            return
        main = importlib.util.module_from_spec(spec)
        main.__name__ = _IMPORTED_MAIN
        code = spec.loader.get_code(module)  # type: ignore[attr-defined]
    elif file is not None:
        main = ModuleType(_IMPORTED_MAIN)
        main.__spec__ = None
        main.__file__ = file
        # A loader would write the compiled script beside it.
        code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    else:
        return
    sys.modules["__main__"] = main
    sys.modules[_IMPORTED_MAIN] = main
    exec(code, vars(main))  # noqa: S102 - the script that the user has started
