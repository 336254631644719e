"""The front door: run a federation, read what came of it, and use its student, as functions.

    run = fpld.run("demo", out="runs/demo", seed=0, overrides={"local.steps": 300})
    run.loss, run.rounds, run.table, run.frame("rounds")
    run.student("best"), run.generate("My fellow citizens"), run.evaluate("my-texts"), run.export("my-model")

A configuration is a preset's name, a TOML file or a `Config`. `run` checks it before anything is trained, and a start
that fails leaves no folder. What is on disk is whole at any moment, so a run that was interrupted or killed can be
continued from its last closed round (`resume`) with the same result.

The commands of the command line sit on these functions. What needs PyTorch or another large library is imported when
it is used.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fpld import validation
from fpld.config import Config, examine, read_config, read_config_text
from fpld.config.config import Finding
from fpld.errors import InputError, MissingExtraError
from fpld.report.run import read_run_data
from fpld.storage.files import parse_toml_tables
from fpld.storage.run_folder import CONFIG, NODE_FILE
from fpld.units import show_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fpld.data import Tokenizer
    from fpld.federation.record import RoundRecord
    from fpld.planner import Forecast, PlanInputs
    from fpld.report.models import SavedModels
    from fpld.report.run import MethodResult, RunData
    from fpld.students import Student

ConfigSource = str | Path | Config
"""A preset's name, the path of a TOML file, or a configuration."""
HUGGINGFACE = "huggingface"
GGUF = "gguf"
MAX_SEED = 2**63 - 1


def load_config(
    config: ConfigSource = "demo", *, seed: int | None = None, overrides: Mapping[str, Any] | None = None
) -> Config:
    """Read and check a configuration.

    Parameters
    ----------
    config
        A preset's name, the path of a TOML file, or a configuration to change.
    seed
        The seed of every draw, in place of `run.seed`.
    overrides
        Values by dotted key, such as `{"local.steps": 300, "nodes[0].bits": 2.0}`. A value may be a whole table, and
        None removes a key.

    Returns
    -------
    Config
        The configuration; `Config.to_toml` writes it.

    Raises
    ------
    InputError
        Naming every key that is unknown, missing, or has a wrong value.

    >>> import fpld
    >>> config = fpld.load_config("demo", overrides={"run.rounds": 2, "local.steps": 300})
    >>> config.local_steps
    600
    """
    return _load(config, seed, overrides)[0]


def _load(config: ConfigSource, seed: int | None, overrides: Mapping[str, Any] | None) -> tuple[Config, str]:
    """Return a configuration and its text."""
    if seed is not None:
        validation.integer("seed", seed, least=0, most=MAX_SEED)
    return read_config(config, seed=seed, overrides=overrides)


def _source_name(config: ConfigSource) -> str:
    """Return what to call a configuration in errors."""
    return "the configuration" if isinstance(config, Config) else str(config)


def check(config: ConfigSource, *, overrides: Mapping[str, Any] | None = None, connect: bool = False) -> list[Finding]:
    """Return everything that is wrong with a configuration, before anything is trained.

    Texts, tokenizers and limits that the configuration names are read; nothing is trained, fetched or written. With a
    section [flower] the nodes' texts are elsewhere, and keys and certificates are looked for.

    Parameters
    ----------
    config
        A preset's name, the path of a TOML file (a node's `node.toml`, too), or a configuration.
    overrides
        Values by dotted key, as in `load_config`.
    connect
        Connect to the aggregator too, and leave again: of a node's file only.

    Returns
    -------
    list of Finding
        Each with `key`, `says`, and `wrong`: True for a problem. If nothing is wrong, there are findings on the disk,
        memory and time that a run takes.

    Raises
    ------
    InputError
        If there is no such file or preset.

    >>> import fpld
    >>> [(finding.key, finding.wrong) for finding in fpld.check("demo", overrides={"run.quorum": 9})][:1]
    [('run.quorum', True)]
    """
    from fpld.baselines import baseline_work
    from fpld.federation.cost import expected_cost
    from fpld.federation.preflight import run_preflight

    if not isinstance(config, Config) and Path(config).name == NODE_FILE:
        from fpld.engines.flower.site.config import check_site

        if overrides:
            raise InputError("overrides are for a run's configuration: change a node's file itself")
        found = check_site(Path(config))
        if connect and not any(finding.wrong for finding in found):
            from fpld.engines.flower.launch.node import try_site

            state = try_site(Path(config))
            found.append(Finding("connection", str(state), wrong=not state.healthy))
        return found
    if connect:
        raise InputError("connect is for a node's file, node.toml: an aggregator connects to nobody")
    checked, findings = _examine(config, overrides)
    if checked is None:
        return findings
    findings += run_preflight(checked, local=checked.flower is None)
    if checked.flower is not None:
        from fpld.engines.flower.launch.aggregator import missing_files

        findings += [Finding("flower", line) for line in missing_files(checked)]
    if any(finding.wrong for finding in findings):
        return findings
    return [*findings, *expected_cost(checked, baselines=baseline_work(checked))]


def _examine(config: ConfigSource, overrides: Mapping[str, Any] | None) -> tuple[Config | None, list[Finding]]:
    """Return the part of a configuration that is sound, if that makes one, and the problems of the rest."""
    from fpld.config import override_keys

    if isinstance(config, Config):
        text = config.to_toml()
        source = _source_name(config)
    else:
        text, source = read_config_text(config)
    if overrides:
        text = override_keys(text, overrides, source)
    checked, problems = examine(text, source)
    findings = [_finding(line) for line in problems]
    if checked is None:
        from fpld.federation.preflight import missing_paths

        with suppress(InputError):
            findings += missing_paths(parse_toml_tables(text))
    return checked, findings


def _finding(problem: str) -> Finding:
    """Return a problem as a finding: the message begins with the key.

    >>> _finding("run.quorum must be at most 3, got 4")[:2]
    ('run.quorum', 'must be at most 3, got 4')
    """
    key, _, rest = problem.partition(" ")
    return Finding(key.rstrip(":"), rest)


def plan(
    source: ConfigSource | PlanInputs,
    *,
    total: float | None = None,
    policy: str | None = None,
    target: float | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Forecast:
    """Forecast bits, bytes and seconds of each site, and the bracket of the loss that quantization adds.

    Parameters
    ----------
    source
        A preset's name, a TOML file, a configuration, the folder of a run, whose measured noise is then taken, or
        `fpld.planner.PlanInputs`.
    total
        Bits per probe context for all sites together. By default those of the configuration, or every site's cap.
    policy
        An allocator's name, or `curves`. By default the one that suits the codec.
    target
        A KL in nats: the least total whose upper bound is at most this. `total` and `policy` are then not used.
    overrides
        Values by dotted key, as in `load_config`.

    Returns
    -------
    Forecast
        With `bits`, `bytes_sent`, `seconds`, the `expected` student (its `share` of the way from the base model to the
        mixture of the nodes' models, `gain` and `loss` in nats), `upper` and `lower`.

    Raises
    ------
    BudgetError
        If the total cannot be met.
    InputError
        If the source cannot be read.

    >>> import fpld
    >>> forecast = fpld.plan("hospitals", total=100.0)
    >>> round(float(forecast.bits.sum()), 6)
    100.0
    """
    from fpld.planner import PlanInputs, forecast, least_total

    if isinstance(source, PlanInputs):
        inputs = source
    else:
        from fpld.planner.inputs import read_plan_source

        changed = load_config(source, overrides=overrides) if overrides else source
        read = read_plan_source(changed if isinstance(changed, Config) else str(changed))
        inputs = read.inputs
        total = read.total if total is None else total
    if target is not None:
        return least_total(inputs, validation.real("target", target, above=0.0))
    return forecast(inputs, policy, total)


def run(
    config: ConfigSource = "demo",
    *,
    out: str | Path | None = None,
    seed: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> Run:
    """Train a federation on this machine, and the baselines that its configuration names.

    Parameters
    ----------
    config
        A preset's name, the path of a TOML file, or a configuration.
    out
        The folder of the run. By default `run.out`, with a number if that is taken.
    seed
        The seed of every draw, in place of `run.seed`.
    overrides
        Values by dotted key, as in `load_config`.
    resume
        Whether to continue the run in `out`, which must be of this configuration.
    progress
        Whether to show progress on standard error: a bar on a terminal or in a notebook, else lines. By default only
        where there is a bar.

    Returns
    -------
    Run
        What came of it.

    Raises
    ------
    InputError
        Naming the key, if the configuration is wrong, or if the folder holds a run. No new folder is left behind.
    KeyboardInterrupt
        If the run was interrupted. The folder stays, and `resume` continues from the last closed round.

    >>> import fpld, tempfile
    >>> run = fpld.run("tiny", out=f"{tempfile.mkdtemp()}/tiny", overrides={"run.rounds": 1})
    >>> run.state, len(run.rounds)
    ('done', 1)
    """
    from fpld.console import show_log
    from fpld.engines.local import run_local as run_federation
    from fpld.federation.preflight import refuse
    from fpld.spawn import stop_before_run

    stop_before_run()
    loaded, text = _load(config, seed, overrides)
    folder = Path(loaded.run.out if out is None else out)
    if out is None and not resume:
        folder = free_folder(folder)
    with show_log(progress), _note_on_interrupt(folder):
        if not resume:
            refuse(loaded, _source_name(config), local=True)
        run_federation(loaded, text, folder, resume=resume)
    return read_run(folder)


def resume(folder: str | Path, *, progress: bool | None = None) -> Run:
    """Continue a run from its last closed round, with the configuration in its folder.

    Parameters
    ----------
    folder
        The folder of a run that was stopped, interrupted or killed.
    progress
        Whether to show progress, as in `run`.

    Returns
    -------
    Run
        The same as an uninterrupted run gives.

    Raises
    ------
    InputError
        If the folder holds no run, or another process works on it.

    >>> import fpld
    >>> fpld.resume("no-such-folder")
    Traceback (most recent call last):
    fpld.errors.InputError: no-such-folder holds no run to resume
    """
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise InputError(f"{folder} holds no run to resume")
    return run(file, out=folder, resume=True, progress=progress)


def free_folder(out: Path) -> Path:
    """Return the folder, or the first of folder-2, folder-3, ... that does not exist."""
    number = 1
    candidate = out
    while candidate.exists():
        number += 1
        candidate = out.with_name(f"{out.name}-{number}")
    return candidate


@contextmanager
def _note_on_interrupt(out: Path) -> Iterator[None]:
    """Add to a KeyboardInterrupt how the run is continued."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if (out / CONFIG).exists():
            interrupt.add_note(f"fpld.resume({str(out)!r}) continues from the last closed round")
        raise


def read_run(folder: str | Path) -> Run:
    """Read a run from its folder, whether it has ended or not.

    Parameters
    ----------
    folder
        The folder that `run`, `fpld run` or `fpld aggregator` wrote.

    Returns
    -------
    Run
        What the folder holds now. Read it again to follow a run that goes on.

    Raises
    ------
    InputError
        If the folder holds no run, or one of its files is damaged.

    >>> import fpld
    >>> fpld.read_run("no-such-folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fpld.errors.InputError: no-such-folder holds no run ...
    """
    return Run(Path(folder), read_run_data(Path(folder)))


class ModelLoss(NamedTuple):
    """What a model is worth on a text: nats per token, bits per byte, perplexity, and the size of the text."""

    model: str
    loss: float
    bits_per_byte: float
    perplexity: float
    tokens: int
    bytes: int


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A run on disk: its numbers as they were when it was read, and its models.

    Attributes
    ----------
    folder
        Where the run is.
    data
        All that it has written, as `fpld.report.run.RunData`.

    >>> import fpld, tempfile
    >>> run = fpld.run("tiny", out=f"{tempfile.mkdtemp()}/tiny")
    >>> [row.method for row in run.table]
    ['base', 'alone: 1790-1849', 'alone: 2000-2026', 'fpld']
    >>> run.rounds[-1].heldout_loss == run.loss
    True
    >>> tokens = run.tokenizer.encode("We the People")
    >>> run.student("best").logits(tokens[None]).shape
    (13, 256)
    >>> len(run.generate("My fellow citizens", tokens=20))
    20
    """

    folder: Path
    data: RunData

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", held-out loss {self.loss:.4f}"
        rounds = f"{len(self.rounds)} of {show_count(self.data.planned_rounds, 'round')}"
        return f"Run({str(self.folder)!r}, {self.state}, {rounds}{loss})"

    @property
    def state(self) -> str:
        """Return `preparing`, `running`, `stalled`, `stopped`, `failed` or `done`."""
        return self.data.state.name

    @property
    def loss(self) -> float | None:
        """Return the held-out loss of the student after the last round, in nats per token; None if not measured."""
        return self.rounds[-1].heldout_loss if self.rounds else None

    @property
    def rounds(self) -> list[RoundRecord]:
        """Return the records of the closed rounds."""
        return self.data.trace

    @property
    def table(self) -> list[MethodResult]:
        """Return a record for each method, `fpld` last: its loss and the bytes it sent. Empty until the run ends."""
        return self.data.results

    @cached_property
    def config(self) -> Config:
        """Return the configuration of the run."""
        return load_config(self.folder / CONFIG)

    def frame(self, name: str = "rounds") -> Any:
        """Return a table of the run as a pandas DataFrame, with the columns that `fpld export` writes.

        Parameters
        ----------
        name
            `rounds` (a row for each round), `nodes` (for each node and round) or `results` (for each method).

        Raises
        ------
        MissingExtraError
            If pandas is not installed: `rounds` and `table` have the same numbers as typed records.
        InputError
            If there is no such table.
        """
        from fpld.report.export import export_tables

        try:
            import pandas as pd  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise MissingExtraError("Run.frame", package="pandas") from None
        tables = export_tables(self.data)
        if name not in ("rounds", "nodes", "results"):
            raise InputError(f"name must be one of rounds, nodes, results, got {name!r}")
        return pd.DataFrame(tables.get(name, []))

    @cached_property
    def _models(self) -> SavedModels:
        from fpld.report.models import open_models

        return open_models(self.folder)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the run's student."""
        return self._models.tokenizer

    def student(self, name: str = "student") -> Student:
        """Open a model of the run.

        Parameters
        ----------
        name
            `student` (of the last round), `best` (of the round with the lowest held-out loss) or `base` (the model
            before the first round).

        Returns
        -------
        Student
            With `logits(sequences)` for token ids [S, T], `loss`, `finetune`, `save`.

        Raises
        ------
        InputError
            If the run has no such model yet.
        """
        return self._models.open(name)

    def generate(
        self, prompt: str = "", *, model: str = "student", seed: int = 0, progress: bool | None = None, **options: Any
    ) -> str:
        """Return a text that a model of the run writes after a prompt; the same seed gives the same text.

        Parameters
        ----------
        prompt
            What the text continues. By default it begins as a document does.
        model
            As in `student`.
        seed
            The seed of the draws.
        progress
            Whether to show progress, as in `fpld.run`.
        options
            `tokens` (100), `temperature` (0.8; 0 takes the likeliest token) and `top` (draw from so many of the
            likeliest tokens; 0: from all).
        """
        from fpld.console import show_log

        with show_log(progress):
            return generate_texts(self._models, prompt, model=model, seed=seed, **options)[0]

    def evaluate(
        self,
        data: str | Path | None = None,
        *,
        field: str = "text",
        length: int | None = None,
        progress: bool | None = None,
    ) -> list[ModelLoss]:
        """Return the loss of each model of the run on a text.

        Parameters
        ----------
        data
            A file or folder of texts. By default the texts that the run held out.
        field
            The field with the text, in files of records.
        length
            Tokens in a window. By default those of the run, so that losses compare with those of `table`.
        progress
            Whether to show progress, as in `fpld.run`.

        Raises
        ------
        InputError
            If the text cannot be read, or the run holds none out.
        """
        from fpld.console import show_log

        with show_log(progress):
            return evaluate_texts(self._models, data, field=field, length=length)

    def export(
        self,
        out: str | Path,
        to: str = HUGGINGFACE,
        *,
        best: bool = False,
        adapter: bool = False,
        licence: str | None = None,
    ) -> list[Path]:
        """Write the student for other programs, or the numbers of the run for other tools.

        Parameters
        ----------
        out
            The folder for the files. A model needs an empty one.
        to
            `huggingface` (model, tokenizer and model card, as transformers loads them), `gguf` (one file for
            llama.cpp), `csv`, `parquet` or `tensorboard`.
        best, adapter, licence
            Of a model: take the student of the best round, write its LoRA adapters alone, and the licence for the card.

        Returns
        -------
        list of Path
            The files that were written.

        Raises
        ------
        InputError
            If the format is unknown, or the student has no form that other libraries read.
        MissingExtraError
            If the library for the format is not installed.
        """
        from fpld.report.export import FORMATS

        folder = Path(out)
        if to == HUGGINGFACE:
            from fpld.report.model_card import to_huggingface

            return to_huggingface(self.folder, self.data, folder, best=best, adapter=adapter, licence=licence)
        if to == GGUF:
            from fpld.report.model_card import to_gguf

            return to_gguf(self.folder, self.data, folder, best=best, licence=licence)
        if to not in FORMATS:
            raise InputError(f"to must be one of {HUGGINGFACE}, {GGUF}, {', '.join(FORMATS)}, got {to!r}")
        folder.mkdir(parents=True, exist_ok=True)
        return FORMATS[to](self.data, folder)


def generate_texts(
    models: SavedModels,
    prompt: str = "",
    *,
    samples: int = 1,
    model: str = "student",
    seed: int = 0,
    tokens: int = 100,
    temperature: float = 0.8,
    top: int = 0,
) -> list[str]:
    """Return texts that a model of a run or of a node writes after a prompt, with seeds from `seed` on."""
    from fpld.progress import report_elapsed
    from fpld.students.generate import continuation

    with report_elapsed(f"opening {model}"):
        student = models.open(model)
    write = partial(
        continuation, student, models.tokenizer_of(model), prompt, tokens=tokens, temperature=temperature, top=top
    )
    with report_elapsed("writing text"):
        return [write(seed=seed + number) for number in range(samples)]


def evaluate_texts(
    models: SavedModels, data: str | Path | None = None, *, field: str = "text", length: int | None = None
) -> list[ModelLoss]:
    """Return the loss of each model of a run or of a node on a text, or on the texts that were held out there."""
    from fpld.report.models import evaluate_models, read_evaluation_texts

    texts = read_evaluation_texts(models, None if data is None else Path(data), field)
    return [ModelLoss(**row) for row in evaluate_models(models, texts, length or models.length)]
