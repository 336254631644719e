"""Figures as PNG and SVG files; the only place that imports matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpld.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.figure import Figure


def save_figure(draw: Callable[[Figure], None], path: Path, size: tuple[float, float]) -> list[Path]:
    """Draw on an empty figure of `size` inches and write it as `path`.png and `path`.svg."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("drawing figures", "figures") from None
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    # A fixed salt and no date: the same numbers give the same file.
    with mpl.rc_context({"svg.hashsalt": "fpld"}):
        figure.savefig(files[0], dpi=150)
        figure.savefig(files[1], metadata={"Date": None})
    return files
