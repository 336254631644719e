"""A run's trace for other tools: tables (rounds, nodes, results) as CSV and Parquet, scalars as TensorBoard events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpld.errors import MissingExtraError
from fpld.report.tables import allocation_rows, result_rows, round_rows
from fpld.storage.files import write_csv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from fpld.report.runs import Run

Row = dict[str, Any]


def tables(run: Run) -> dict[str, list[Row]]:
    """Return the tables that are not empty: one row a round, one a node and round, one a method."""
    found = {"rounds": round_rows(run), "nodes": allocation_rows(run), "results": result_rows([run])}
    return {name: rows for name, rows in found.items() if rows}


def to_csv(run: Run, folder: Path) -> list[Path]:
    """Write each table as CSV."""
    files = []
    for name, rows in tables(run).items():
        write_csv(folder / f"{name}.csv", rows)
        files.append(folder / f"{name}.csv")
    return files


def to_parquet(run: Run, folder: Path) -> list[Path]:
    """Write each table as Parquet."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("Parquet", "export") from None
    files = []
    for name, rows in tables(run).items():
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        files.append(folder / f"{name}.parquet")
    return files


def to_tensorboard(run: Run, folder: Path) -> list[Path]:
    """Write scalars by round, and trainings by step, as a TensorBoard event file.

    `tensorboard --logdir` of the folder above shows them.
    """
    return follow_tensorboard([run], folder)


def follow_tensorboard(stages: Iterable[Run], folder: Path) -> list[Path]:
    """Write the scalars of a run as it is at some moments, one after the other: each number once."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise MissingExtraError("TensorBoard event files", "export") from None
    place, seen = folder / "tensorboard", set[tuple[str, int]]()
    before = set(place.glob("events.*"))
    with SummaryWriter(str(place)) as writer:
        for run in stages:
            for tag, step, value in scalars(run):
                if (tag, step) not in seen:
                    writer.add_scalar(tag, value, step)
                    seen.add((tag, step))
            writer.flush()
    return sorted(set(place.glob("events.*")) - before)


def scalars(run: Run) -> Iterator[tuple[str, int, float]]:
    """Yield the tag, the step and the value of every number of a trace and of every point of a curve."""
    for row in round_rows(run):
        for name, value in row.items():
            if name != "round" and value is not None:
                yield f"round/{name}", row["round"], value
    for row in allocation_rows(run):
        for name in ("bits_allotted", "bits_sent", "bytes", "weight", "heldout_loss", "seconds"):
            if row[name] is not None:
                yield f"{name}/{row['node']}", row["round"], row[name]
    for (method, model, what), points in run.curves.items():
        for point in points:
            tag = "/".join(filter(None, (what, method, model, f"round_{point.round}" if point.round else "")))
            yield tag, point.step, point.loss


FORMATS: dict[str, Callable[[Run, Path], list[Path]]] = {
    "csv": to_csv,
    "parquet": to_parquet,
    "tensorboard": to_tensorboard,
}
