"""The prior of a round: the last student's prediction of the probe set, and what nodes need to compute it too."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fpld.federation import jobs
from fpld.federation.predictions import Predictions
from fpld.federation.priorfile import FILE, fits, map_prior
from fpld.federation.training import open_student
from fpld.pace import Subject, run_on
from fpld.protocol.priors import ComputedPrior
from fpld.registry import codecs

if TYPE_CHECKING:
    from fpld.codecs import Prior
    from fpld.data import ProbeSet
    from fpld.federation.rounds import Setup
    from fpld.protocol.priors import Notes
    from fpld.storage.folder import Arrays


class RoundPrior(NamedTuple):
    """A prior, and the notes for nodes that compute it; neither if the codec needs none."""

    prior: Prior | None = None
    notes: Notes | None = None


def round_prior(setup: Setup, student: Arrays, probe: ProbeSet) -> RoundPrior:
    """Predict the probe set of a round with a student, if the codec codes against a prior."""
    if not codecs.get(setup.config.codec.name).traits.prior:
        return RoundPrior()
    shape = probe.contexts, probe.vocab
    path = setup.store.path / FILE if fits(shape) else None
    margin = setup.config.probe.margin
    subject = Subject(setup.method, model="student")
    notes = setup.pool.submit(run_on, subject, jobs.predict, setup.base, student, probe, path, margin).result()
    if path is None:
        predict = Predictions(open_student(setup.base, student), probe.sequences)
        return RoundPrior(ComputedPrior(predict, notes), notes)
    return RoundPrior(map_prior(path, shape), notes)


def drop_prior(setup: Setup) -> None:
    """Delete the file of a round that is over."""
    (setup.store.path / FILE).unlink(missing_ok=True)
