"""Trackers for TensorBoard, MLflow and Weights & Biases (`fpld.federation.tracking` has their contract)."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from fpld.federation.tracking import Tracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.federation.tracking import Scalar, TrackedRun

PROJECT = "fpld"
"""The experiment of MLflow and the project of Weights & Biases, unless their own variables name another."""
_MLFLOW_PARAMETERS = 100  # of a request at most, as MLflow has it
_MLFLOW_METRICS = 1000


class TensorBoard(Tracker):
    """TensorBoard event files in `tracking/tensorboard`."""

    extra = "export"

    @classmethod
    def load(cls) -> None:
        """Import tensorboardX."""
        import tensorboardX  # noqa: F401

    def open(self, run: TrackedRun) -> None:
        """Begin an event file; TensorBoard reads all files of a folder as one run."""
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"))

    def write(self, scalars: Sequence[Scalar]) -> None:
        """Write scalars."""
        for scalar in scalars:
            self._writer.add_scalar(scalar.tag, scalar.value, scalar.step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - an event file has no state
        """Close the file."""
        self._writer.close()


class MLflow(Tracker):
    """MLflow: in `tracking/mlflow.db`, or where `MLFLOW_TRACKING_URI` points."""

    extra = "mlflow"

    @classmethod
    def load(cls) -> None:
        """Import MLflow."""
        import mlflow.tracking  # noqa: F401

    def open(self, run: TrackedRun) -> None:
        """Find the run with this key, or make one, with the configuration as its parameters."""
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
        self._client = MlflowClient(tracking_uri=place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        before = self._client.search_runs([number], f"tags.`fpld.key` = '{run.key}'", max_results=1)
        if before:
            self._id = before[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(number, run_name=run.name, tags={"fpld.key": run.key}).info.run_id
            parameters = [Param(key, str(value)) for key, value in run.settings.items()]
            for first in range(0, len(parameters), _MLFLOW_PARAMETERS):
                self._client.log_batch(self._id, params=parameters[first : first + _MLFLOW_PARAMETERS])

    def write(self, scalars: Sequence[Scalar]) -> None:
        """Write metrics."""
        now = int(time.time() * 1000)
        metrics = [self._metric(scalar.tag, scalar.value, now, scalar.step) for scalar in scalars]
        for first in range(0, len(metrics), _MLFLOW_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MLFLOW_METRICS])

    def close(self, *, failed: bool) -> None:
        """Set the state of the run."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class WeightsAndBiases(Tracker):
    """Weights & Biases: offline in `tracking/wandb`, or as `WANDB_MODE` says; `wandb sync` sends what is offline."""

    extra = "wandb"

    @classmethod
    def load(cls) -> None:
        """Import wandb."""
        import wandb  # noqa: F401

    def open(self, run: TrackedRun) -> None:
        """Begin the run, or go on with it."""
        import wandb

        self._axes = set[str]()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.name,
            id=run.key,
            resume="allow",
            dir=str(run.folder),
            mode=None if os.environ.get("WANDB_MODE") else "offline",  # None: as the variable says
            config=dict(run.settings),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, scalars: Sequence[Scalar]) -> None:
        """Write each number over an axis of its own: the rounds, or the steps of a training."""
        for scalar in scalars:
            axis = f"{scalar.tag}/step"
            if axis not in self._axes:
                self._axes.add(axis)
                self._run.define_metric(axis, hidden=True)
                self._run.define_metric(scalar.tag, step_metric=axis)
            self._run.log({scalar.tag: scalar.value, axis: scalar.step})

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=int(failed))
