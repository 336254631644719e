"""Export a run for other tools: rounds, nodes and results as CSV and Parquet, scalars as TensorBoard events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpld.errors import MissingExtraError
from fpld.federation.tracking import Scalar, curve_tag, record_scalars
from fpld.report.tables import allocation_rows, result_rows, round_rows
from fpld.storage.files import write_csv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from fpld.report.run import RunData

Row = dict[str, Any]


def export_tables(run: RunData) -> dict[str, list[Row]]:
    """Return the tables that are not empty: one row a round, one a node and round, one a method."""
    tables = {"rounds": round_rows(run), "nodes": allocation_rows(run), "results": result_rows([run])}
    return {name: rows for name, rows in tables.items() if rows}


def to_csv(run: RunData, folder: Path) -> list[Path]:
    """Write each table as CSV; return the files."""
    files = {folder / f"{name}.csv": rows for name, rows in export_tables(run).items()}
    for file, rows in files.items():
        write_csv(file, rows)
    return list(files)


def to_parquet(run: RunData, folder: Path) -> list[Path]:
    """Write each table as Parquet; return the files."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("Parquet", "export") from None
    files = {folder / f"{name}.parquet": rows for name, rows in export_tables(run).items()}
    for file, rows in files.items():
        parquet.write_table(pa.Table.from_pylist(rows), file)
    return list(files)


def to_tensorboard(run: RunData, folder: Path) -> list[Path]:
    """Write scalars by round, and trainings by step, as a TensorBoard event file in `folder`/tensorboard."""
    return follow_tensorboard([run], folder)


def follow_tensorboard(stages: Iterable[RunData], folder: Path) -> list[Path]:
    """Write the scalars of a run that is read again and again while it goes on; each number is written once.

    Returns
    -------
    The event files that are new.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise MissingExtraError("TensorBoard event files", "export") from None
    target = folder / "tensorboard"
    written = set[tuple[str, int]]()
    before = set(target.glob("events.*"))
    with SummaryWriter(str(target)) as writer:
        for run in stages:
            for tag, step, value in scalars(run):
                if (tag, step) not in written:
                    writer.add_scalar(tag, value, step)
                    written.add((tag, step))
            writer.flush()
    return sorted(set(target.glob("events.*")) - before)


def scalars(run: RunData) -> Iterator[Scalar]:
    """Yield every number of the trace and every point of a curve."""
    for record, sent in zip(run.trace, run.uplink_bytes, strict=True):
        yield from record_scalars(record, run.nodes, sent)
    for (method, model, what), points in run.curves.items():
        for point in points:
            yield Scalar(curve_tag(what, method, model, point.round), point.step, point.loss)


FORMATS: dict[str, Callable[[RunData, Path], list[Path]]] = {
    "csv": to_csv,
    "parquet": to_parquet,
    "tensorboard": to_tensorboard,
}
