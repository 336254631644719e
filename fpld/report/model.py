"""A run's student as a folder for other programs: model, tokenizer and model card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpld import __version__
from fpld.errors import InputError
from fpld.report.card import model_card
from fpld.report.models import open_models
from fpld.storage.files import write_shared
from fpld.students.export import export_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.report.runs import Run
    from fpld.students import Student


def to_huggingface(
    folder: Path, run: Run, out: Path, *, best: bool = False, adapter: bool = False, licence: str | None = None
) -> list[Path]:
    """Write the student of the run in `folder` for transformers, or its adapters for peft; return the files."""
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"--out: {out} is not empty: an exported model needs a folder of its own")
    models = open_models(folder)
    student = models.open("best" if best else "student")
    student.export(out, adapter=adapter)
    export_tokenizer(models.tokenizer, out, student.longest)
    card = model_card(run, _facts(student, run, best=best), licence=licence, adapter=adapter)
    write_shared(out / "README.md", card)
    return sorted(file for file in out.iterdir() if file.is_file())


def _facts(student: Student, run: Run, *, best: bool) -> dict[str, Any]:
    config = student.config
    facts = {
        "kind": {"transformer": "a Llama, trained from nothing"}.get(student.kind, "a pretrained model, fine-tuned"),
        "parameters that were trained": student.parameters,
        "vocabulary": student.vocab,
        "context in tokens": student.longest,
        "student": "that of the round with the lowest held-out loss" if best else "that of the last round",
        "rounds": f"{len(run.trace)} of {run.rounds}",
        "made with": f"fpld {__version__}",
    }
    if student.kind == "huggingface":
        facts |= {"LoRA rank": config.lora, "SHA-256 of the pretrained weights": config.weights}
    return facts
