"""Export a run's student as a folder for `transformers` or `peft`: model, tokenizer and model card.

The card is Markdown for the folder's README: what the student is, what it was made from, and its held-out loss.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld import __version__
from fpld.data.fetch import ARCHIVES
from fpld.errors import InputError
from fpld.report.models import open_models
from fpld.report.tables import heading, node_rows, round_rows
from fpld.storage.files import TEMPORARY_PREFIX, write_shared
from fpld.students.export import export_tokenizer
from fpld.students.gguf_file import write_gguf
from fpld.units import parse_rate, show_rate, show_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.report.run import RunData
    from fpld.students import Student

UNSTATED = "other"
GGUF_FILE = "student.gguf"
_LICENCES = {name: archive.licence for name, archive in ARCHIVES.items()} | {"sotu": "US Government works"}
_HEAD = """\
---
library_name: {library}
pipeline_tag: text-generation
license: {licence}
tags: [federated-learning, distillation]
---

# Student of a federation of {nodes} nodes

One language model, distilled from models at {nodes} nodes whose texts were not moved: by Federated Probe-Logit
Distillation (fpld)."""
_END = """\
The licences of the texts, and of a pretrained model if there is one, hold beside it. The numbers are measured on
held-out text of the same nodes. Nothing was done to remove personal data: a model may repeat what it was trained on.
"""
_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("this folder")
model = AutoModelForCausalLM.from_pretrained("this folder")
ids = tokenizer("The", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))
```
"""
_USE_ADAPTER = """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("the base model's folder")
model = PeftModel.from_pretrained(model, "this folder")
```
"""


def model_card(run: RunData, facts: Mapping[str, Any], *, licence: str | None, adapter: bool) -> str:
    """Return the card of a run's student.

    Parameters
    ----------
    facts
        Names and values of the list about the model.
    licence
        The licence of the weights, an identifier such as apache-2.0.
    adapter
        Whether LoRA adapters are exported, and not a whole model.
    """
    if licence is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}", licence):
        raise InputError(f"--license must be the name of a licence, such as apache-2.0, got {licence!r}")
    library = "peft" if adapter else "transformers"
    parts = [
        _HEAD.format(library=library, licence=licence or UNSTATED, nodes=len(run.nodes)),
        "## The model\n\n" + _list(facts),
        "## Use\n\n" + (_USE_ADAPTER if adapter else _USE),
        "## Data\n\n" + _list(_data(run)),
        f"## Budgets\n\n{run.bits_unit.capitalize()}, and bytes of all rounds.\n\n" + _table(_nodes(run)),
        "## Rounds\n\nHeld-out loss of the student in nats per token, over the nodes that evaluated it.\n\n"
        + _table(_rounds(run)),
    ]
    if run.results:
        rows = [row.model_dump() for row in run.results]
        parts.append("## Compared\n\nOn held-out text of all nodes.\n\n" + _table(rows))
    terms = "The maker has not stated a licence." if licence is None else f"Licence of the weights: {licence}."
    parts.append(f"## Licence and limits\n\n{terms} {_END}")
    return "\n\n".join(parts)


def _data(run: RunData) -> dict[str, Any]:
    """Return where the texts came from, without paths of the machine."""
    data = run.section("data")
    probe = run.section("probe")
    corpus = data.get("corpus")
    source = f"the corpus {corpus} ({_LICENCES.get(str(corpus), 'licence not known')})" if corpus else "their own"
    label = str(probe.get("source", ""))
    left_out = [use.left_out for use in run.texts if use.left_out]
    public = f"{label!r} of the corpus" if corpus and "/" not in label else "a text of the aggregator's"
    return {
        "private text": f"{source}, at {', '.join(run.nodes)}",
        "public text (tokenizer, base model, probe set)": public,
        "probe set": f"{probe.get('contexts', 16384)} contexts, in sequences of {probe.get('length', 32)} tokens",
        "held out for evaluation": ", ".join(f"{use.heldout_share} at {use.name}" for use in run.texts if use.heldout)
        or f"{data.get('heldout', 0.15):.0%} of each node's text",
    } | ({"not all text was used": "; ".join(left_out)} if left_out else {})


def _nodes(run: RunData) -> list[dict[str, Any]]:
    limits = [_limit(table, run) for table in run.node_settings]
    return [
        {
            "node": row["node"],
            "limit": limit,
            run.bits_unit: row["bits_mean"],
            "bytes sent": row["bytes"],
            "rounds": row["rounds_answered"],
            "held-out loss": row["heldout_loss"],
        }
        for row, limit in zip(node_rows(run), limits, strict=False)
    ]


def _limit(node: Mapping[str, Any], run: RunData) -> str:
    if "bits" in node:
        return f"{run.in_bits_unit(node['bits']):g} {run.bits_unit}"
    if "context_bits" in node:
        return f"{node['context_bits']:g} bits per context"
    return show_rate(parse_rate(node["uplink"])) if "uplink" in node else "none"


def _rounds(run: RunData) -> list[dict[str, Any]]:
    return [
        {
            "round": row["round"],
            "nodes": row["answered"],
            "held-out loss": row["heldout_loss"],
            "sent so far": show_size(row["all_bytes"]),
        }
        for row in round_rows(run)
    ]


def _list(facts: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {_cell(value)}" for name, value in facts.items())


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "None yet."
    lines = ["| " + " | ".join(heading(name) for name in rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(_cell(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else _escape(str(value))


def _escape(text: str) -> str:
    """Escape Markdown: names come from a file that anyone may have written."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else " " if c in "\r\n" else c for c in text)


def to_huggingface(
    folder: Path, run: RunData, out: Path, *, best: bool = False, adapter: bool = False, licence: str | None = None
) -> list[Path]:
    """Write the student of the run in `folder` for transformers, or its adapters for peft.

    Parameters
    ----------
    out
        A folder that is empty or does not exist.
    best
        Take the student of the round with the lowest held-out loss, and not that of the last round.

    Returns
    -------
    The files that were written.
    """
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"--out: {out} is not empty: an exported model needs a folder of its own")
    models = open_models(folder)
    student = models.open("best" if best else "student")
    student.export(out, adapter=adapter)
    export_tokenizer(models.tokenizer, out, student.longest)
    card = model_card(run, _facts(student, run, best=best), licence=licence, adapter=adapter)
    write_shared(out / "README.md", card)
    return sorted(file for file in out.iterdir() if file.is_file())


def to_gguf(folder: Path, run: RunData, out: Path, *, best: bool = False, licence: str | None = None) -> list[Path]:
    """Write the student of the run in `folder` as one file for llama.cpp, `student.gguf`; return it in a list."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / GGUF_FILE
    with tempfile.TemporaryDirectory(dir=out, prefix=TEMPORARY_PREFIX) as temporary:
        exported = Path(temporary, "model")
        to_huggingface(folder, run, exported, best=best, licence=licence)
        made = Path(temporary, GGUF_FILE)
        write_gguf(exported, made, name=f"Student of {len(run.nodes)} nodes (fpld)", licence=licence)
        made.replace(file)
    return [file]


def _facts(student: Student, run: RunData, *, best: bool) -> dict[str, Any]:
    facts = {
        "kind": {"transformer": "a Llama, trained from nothing"}.get(student.kind, "a pretrained model, fine-tuned"),
        "parameters that were trained": student.parameters,
        "vocabulary": student.vocab,
        "context in tokens": student.longest,
        "student": "that of the round with the lowest held-out loss" if best else "that of the last round",
        "rounds": f"{len(run.trace)} of {run.planned_rounds}",
        "made with": f"fpld {__version__}",
    }
    if student.kind == "huggingface":
        facts |= {"LoRA rank": student.config.lora, "SHA-256 of the pretrained weights": student.config.weights}
    return facts
