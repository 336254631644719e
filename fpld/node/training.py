"""The models of a node: made and opened on its device, trained on its text, accounted for, and kept for their users.

Bits depend on the number of threads, and one process per node is faster than threads: so PyTorch has one, unless the
machine's `Compute` says otherwise. Where the configuration has [privacy], local training is DP-SGD. Each round then
adds its steps to the node's `privacy.json`, from which the epsilon of the run is computed.

Models are kept for `fpld generate`, `fpld evaluate` and `fpld export`; no round depends on them. The metadata of each
names its run. Their losses on held-out text stand beside the student's in the results. A run on one machine has them
all; over a network they belong to the site, and are sent only with its permission.

METHOD/best.safetensors             the student of the round with the lowest held-out loss
METHOD/nodes/N/alone.safetensors    node N's model after its first round: the base, trained on its own text alone
METHOD/nodes/N/own.safetensors      node N's model after its last round: the student, trained on its own text
METHOD/nodes/N/adopted.safetensors  node N's model, if it is of another kind, distilled from the last student
"""

from __future__ import annotations

import filecmp
import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import students
from fpld.data.probe import ProbeSet
from fpld.data.token_stream import join_tokens, open_text
from fpld.errors import InputError
from fpld.privacy import DpSteps, Mechanism, PrivateText, RandomSource, calibrate_mechanism, cut_text, epsilon
from fpld.privacy.sampling import by_window
from fpld.storage.arrays import read_arrays
from fpld.storage.files import parse_json, read_utf8, write_atomic
from fpld.storage.run_folder import ADOPTED_MODEL, ALONE_MODEL, OWN_MODEL, PRIVACY, PROBE
from fpld.students import student_class
from fpld.students.base import PublicText
from fpld.students.configs import Compute
from fpld.students.heldout import mean_losses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from fpld.config import Config, PrivacySection
    from fpld.storage.run_folder import RunFolder
    from fpld.students import Student
    from fpld.students.configs import StudentChoice
    from fpld.students.heldout import HeldoutText, Nats
    from fpld.types import Array, Arrays, Tokens

_DEVICE_SUFFIX = ".device"
_compute = Compute()  # of this process: the machine's, not a model's, and no result on the wire depends on it


def use_compute(compute: Compute) -> None:
    """Set what this process computes with; models that are made or opened from here on follow it."""
    global _compute  # as PyTorch's own number of threads, a process has it once
    _compute = compute


@contextmanager
def computing_with(compute: Compute) -> Iterator[None]:
    """Let this process compute with something else for a while; its own setting and PyTorch's threads then return."""
    own = _compute
    torch: Any = sys.modules.get("torch")
    threads = own.threads if torch is None else torch.get_num_threads()
    use_compute(compute)
    try:
        yield
    finally:
        use_compute(own)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(threads)


def make_student(choice: StudentChoice, vocab: int, seed: int) -> Student:
    """Make the student of a [student] table, for a vocabulary of V tokens."""
    set_threads(choice.kind)
    kind = student_class(choice.kind)
    device = _device(choice.device) if kind.has_devices else choice.device or "cpu"
    return kind(replace(choice.settings, vocab=vocab), seed=seed, device=device).compute_with(_compute)


def _device(named: str | None) -> str:
    """Return the device of a model that names one or none; a model that does not fit on a GPU is kept on the CPU."""
    return "cpu" if _compute.sharded else named or _compute.device


def save_base(student: Student, path: Path, device: str | None) -> None:
    """Write a model that this machine's processes open on a device (None: that of the machine).

    The device belongs to the machine and not to the model, which other machines get: it is in a file beside the model.
    """
    if device is not None:
        write_atomic(path.with_suffix(_DEVICE_SUFFIX), device.encode())
    student.save(path)


def open_student(base: Path, state: Arrays | None = None) -> Student:
    """Load a model to work with in this process, on its device or the machine's; `state` replaces its weights."""
    student = students.load(base)
    beside = base.with_suffix(_DEVICE_SUFFIX)
    student.to(_device(read_utf8(beside) if beside.exists() else None)).compute_with(_compute)
    set_threads(student.kind)
    if state is not None:
        student.load_state(state)
    return student


def set_threads(kind: str) -> None:
    """Set PyTorch to the machine's number of threads, one by default, if a kind of student needs it."""
    # This imports the module of the kind, and PyTorch with it.
    student_class(kind)
    if "torch" in sys.modules:
        from fpld.students.devices import use_threads

        use_threads(_compute.threads)


def average(states: Sequence[Arrays]) -> Arrays:
    """Return the mean of the nodes' weights, each node with the same weight."""
    return {
        name: np.asarray(np.mean([state[name] for state in states], axis=0, dtype=np.float64), np.float32)
        for name in states[0]
    }


class PrivacyBudget(NamedTuple):
    """The terms of differential privacy for each unit of a node's text, over the local steps of all rounds."""

    terms: PrivacySection
    steps: int
    probe: Path
    """The file of the probe set: public text, which chooses what is trained."""


def privacy_budget(config: Config, files: Path) -> PrivacyBudget | None:
    """Return the privacy budget of each node, or None if training is not private; `files` is the run's folder."""
    return None if config.privacy is None else PrivacyBudget(config.privacy, config.local_steps, files / PROBE)


def train_on_texts(
    student: Student,
    texts: Sequence[Path],
    budget: PrivacyBudget | None,
    *,
    steps: int,
    seed: int,
    rate: float | None,
    secret: bool = False,
) -> DpSteps | None:
    """Fine-tune a model on one text, or on several pooled; with a privacy budget by DP-SGD.

    Parameters
    ----------
    secret
        Draw the noise from the system's cryptographic generator instead of `seed`.

    Returns
    -------
    DpSteps or None
        The steps for the privacy accounting, if training is private.
    """
    if budget is None:
        tokens = join_tokens([open_text(text).lesson for text in texts])
        student.finetune(tokens, steps=steps, seed=seed, rate=rate)
        return None
    text, mechanism = private_training(student, texts, budget)
    random = RandomSource.secret() if secret else RandomSource.seeded(seed)
    public = None
    if budget.terms.trained == "subspace":
        public = PublicText(ProbeSet.load(budget.probe).sequences, budget.terms.numbers)
    student.finetune_privately(
        text, mechanism, steps=steps, random=random, rate=rate, average=budget.terms.average, public=public
    )
    return mechanism.spent(steps)


def private_training(student: Student, texts: Sequence[Path], budget: PrivacyBudget) -> tuple[PrivateText, Mechanism]:
    """Return the units of texts, and the mechanism that keeps within their privacy budget."""
    terms = budget.terms
    text = _units(texts, student.window)
    if terms.unit == "window":
        text = by_window(text)
    return text, calibrate_mechanism(
        text,
        epsilon=terms.epsilon,
        delta=terms.delta,
        clip=terms.clip,
        batch=terms.units(student.config.batch),
        windows=terms.windows,
        steps=budget.steps,
    )


def _units(texts: Sequence[Path], window: int) -> PrivateText:
    """Cut texts into units; documents of different texts are never in one group."""
    tokens: list[Tokens] = []
    lengths: list[Array] = []
    groups: list[Array] = []
    first = 0
    for path in texts:
        text = open_text(path)
        if text.lengths is None or text.groups is None:
            raise InputError(f"{path} does not say where documents end: start the run again")
        tokens.append(text.lesson)
        lengths.append(text.lengths)
        groups.append(text.groups + first)
        first += int(text.groups.max()) + 1
    return cut_text(join_tokens(tokens), np.concatenate(lengths), np.concatenate(groups), window)


def record_dp_steps(folder: Path, round: int, spent: DpSteps) -> None:
    """Record the private steps of a node in a round; those of a repeated round replace the earlier ones."""
    rounds = _rounds(folder) | {round: spent}
    rows = [{"round": number, **steps._asdict()} for number, steps in sorted(rounds.items())]
    write_atomic(folder / PRIVACY, (json.dumps(rows, indent=1) + "\n").encode())


def run_epsilon(folder: Path, delta: float) -> float | None:
    """Return the epsilon that a node has spent in a run, at `delta`; None where training is not private."""
    rounds = _rounds(folder)
    return epsilon(rounds.values(), delta) if rounds else None


def write_privacy_report(run: RunFolder, config: Config, nodes: Path) -> None:
    """Write `privacy.json` of a local run, with the epsilon of each node; no file if training is not private."""
    terms = config.privacy
    if terms is None:
        return
    rows = []
    for index, node in enumerate(config.nodes):
        spent = list(_rounds(nodes / str(index)).values())
        last = spent[-1] if spent else DpSteps(0.0, 0.0, 0)
        row = {"node": node.name, "unit": terms.unit, "noise": last.noise, "rate": last.rate}
        row |= {"steps": sum(each.steps for each in spent), "epsilon": epsilon(spent, terms.delta)}
        rows.append(row | {"promised": terms.epsilon, "delta": terms.delta})
    run.write_json(PRIVACY, rows)


def _rounds(folder: Path) -> dict[int, DpSteps]:
    path = folder / PRIVACY
    if not path.exists():
        return {}
    try:
        return {row["round"]: DpSteps(row["noise"], row["rate"], row["steps"]) for row in parse_json(read_utf8(path))}
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged ({error}): start the run again") from None


def keep_node_model(folder: Path, round: int, model: Student, *, run: str) -> None:
    """Write a node's own model after a round."""
    model.save(folder / OWN_MODEL, run=run)
    if round == 1:
        model.save(folder / ALONE_MODEL, run=run)


def read_kept_model(path: Path, run: str) -> Arrays:
    """Return the parameters of a kept model; raise InputError for one of another run."""
    state, metadata = read_arrays(path)
    if metadata.get("run") != run:
        raise InputError(f"{path} is not of this run: start the run again")
    return state


class NodeModelNats(NamedTuple):
    """The nats of a node's own model after the federation and without it; None for a model that is not there."""

    own: Nats | None
    alone: Nats | None

    def losses(self, node: int) -> dict[str, float | None]:
        """Return the row of `node_model_losses`."""
        several = any(nats is not None and len(nats) > 1 for nats in self)
        table: dict[str, float | None] = {}
        for name, nats in (("own", self.own), ("alone", self.alone)):
            losses = None if nats is None else mean_losses(nats)
            table[name] = None if losses is None else losses[node]
            if several:
                table[f"{name}_all"] = None if losses is None else float(np.mean(losses))
        return table


def node_model_losses(
    folder: Path, texts: Sequence[HeldoutText], node: int, length: int, *, run: str | None = None
) -> dict[str, float | None]:
    """Evaluate a node's model after the federation (`own`) and without it (`alone`).

    The model after the federation is the one after the node's last training. Where it is of another kind than the
    student, it has also been distilled from the last student.

    Parameters
    ----------
    texts, node
        The held-out texts, and which of them is the node's.
    run
        Models of another run are refused (None: they are not checked).

    Returns
    -------
    dict
        `own` and `alone`: the losses on the node's text. With several texts also `own_all` and `alone_all`, the means
        over all texts. None stands for a model that is not there.
    """
    return node_model_nats(folder, texts, length, run=run).losses(node)


def node_model_nats(
    folder: Path, texts: Sequence[HeldoutText], length: int, *, run: str | None = None
) -> NodeModelNats:
    """Evaluate the models of `node_model_losses` token by token."""
    last = folder / (ADOPTED_MODEL if (folder / ADOPTED_MODEL).exists() else OWN_MODEL)
    first = folder / ALONE_MODEL
    own = _nats(last, texts, length, run)
    # After a single round both are the same model.
    same = first.exists() and last.exists() and filecmp.cmp(first, last, shallow=False)
    return NodeModelNats(own, own if same else _nats(first, texts, length, run))


def _nats(path: Path, texts: Sequence[HeldoutText], length: int, run: str | None) -> Nats | None:
    if not path.exists():
        return None
    if run is not None:
        read_kept_model(path, run)
    student = open_student(path)
    return [text.nats(student, length) for text in texts]
