"""The prior of a round: the last student's prediction of the probe set, and what nodes need to compute it too."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fpld.federation import workers
from fpld.node.prior_cache import Predictions, fits_in_file, map_prior
from fpld.node.training import open_student
from fpld.progress import ProgressLabel, run_labelled
from fpld.protocol.shared_prior import ComputedPrior
from fpld.registry import codecs
from fpld.storage.run_folder import PRIOR

if TYPE_CHECKING:
    from fpld.codecs.prior import Prior
    from fpld.data import ProbeSet
    from fpld.federation.setup import Setup
    from fpld.protocol.shared_prior import PriorNotes
    from fpld.types import Arrays


class RoundPrior(NamedTuple):
    """A prior, and the notes for nodes that compute it; neither if the codec needs none."""

    prior: Prior | None = None
    notes: PriorNotes | None = None


def round_prior(setup: Setup, student: Arrays, probe: ProbeSet) -> RoundPrior:
    """Predict the probe set of a round with a student, if the codec codes against a prior."""
    if not codecs.get(setup.config.codec.name).traits.prior:
        return RoundPrior()
    shape = probe.contexts, probe.vocab
    path = setup.store.path / PRIOR if fits_in_file(shape) else None
    margin = setup.config.probe.margin
    subject = ProgressLabel(setup.method, model="student")
    notes = setup.pool.submit(run_labelled, subject, workers.predict, setup.base, student, probe, path, margin).result()
    if path is None:
        predict = Predictions(open_student(setup.base, student), probe.sequences)
        return RoundPrior(ComputedPrior(predict, notes), notes)
    return RoundPrior(map_prior(path, shape), notes)


def drop_prior(setup: Setup) -> None:
    """Delete the file of a round that is over."""
    (setup.store.path / PRIOR).unlink(missing_ok=True)
