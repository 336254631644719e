"""`fpld generate`, `fpld evaluate` and `fpld export`: what to do with the models and numbers of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from fpld import api
from fpld.cli.arguments import Command
from fpld.errors import InputError
from fpld.progress import report_elapsed
from fpld.report.export import FORMATS, follow_tensorboard
from fpld.report.run import run_state
from fpld.units import show_count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from fpld.cli.output import Output
    from fpld.report.run import RunData

TENSORBOARD = "tensorboard"
FOLLOW_SECONDS = 3.0  # between two looks at a run that is followed
_GENERATE_EPILOG = """\
RUN is the folder of a run, finished or not, or a node's folder. Without a prompt the text begins as a document does.
The same seed gives the same text. Examples:

  fpld generate runs/demo --prompt "The state of the Union"
  fpld generate runs/demo --tokens 200 --temperature 0.7 --seed 3
"""

_EVALUATE_EPILOG = """\
RUN is the folder of a run, finished or not, or a node's folder. Windows are as long as in the run, so the numbers are
those of its table. The models of a run:

  student   the last one
  best      the student of the round with the lowest held-out loss
  base      the model before the first round

And those of a node:

  own       its model of the last round: the student, trained on the node's text
  alone     its model of the first round: the base, trained on the node's text, without anything from other nodes
  `adopted` its own model, distilled from the last student, where it is of another kind than the student

Examples:

  fpld evaluate runs/demo --data my-texts
  fpld evaluate runs/demo                                 the held-out texts of the run
  fpld evaluate north --data texts                        at a node
"""

_EXPORT_EPILOG = """\
huggingface: a folder that AutoModelForCausalLM and AutoTokenizer load without fpld, with a model card.
gguf: one file for llama.cpp, student.gguf, in float32; llama-quantize makes it smaller.
CSV and Parquet: rounds (one row a round), nodes (one row a node and round) and results (one row a method).
TensorBoard: the same numbers as scalars by round, and the curves of all trainings; with --follow as the run goes.
Private text is never copied. Examples:

  fpld export runs/demo --to huggingface --out student
  fpld export runs/demo --to huggingface --out student --license apache-2.0 --push OWNER/NAME
  fpld export runs/demo --to gguf --out student-gguf
  fpld export runs/demo
  fpld export runs/demo --to parquet tensorboard --out exported
  fpld export runs/demo --to tensorboard --follow
"""


def _configure_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or of a node")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="the beginning of the text")
    parser.add_argument("--tokens", type=int, default=100, help="how many tokens to write (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default: 0.8)")
    parser.add_argument("--top", type=int, default=0, help="draw from so many of the likeliest tokens (default: all)")
    parser.add_argument("--samples", type=int, default=1, help="how many texts (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    parser.add_argument("--model", default="student", help="student, best or base; at a node own, `adopted` or alone")


def _generate(arguments: argparse.Namespace, output: Output) -> int:
    """Write the texts."""
    from fpld.report.models import open_models
    from fpld.validation import check_count

    check_count("--samples", arguments.samples, 1)
    with output.status():
        texts = api.generate_texts(
            open_models(arguments.run),
            arguments.prompt,
            samples=arguments.samples,
            model=arguments.model,
            seed=arguments.seed,
            tokens=arguments.tokens,
            temperature=arguments.temperature,
            top=arguments.top,
        )
    rows = [{"seed": arguments.seed + i, "prompt": arguments.prompt, "text": text} for i, text in enumerate(texts)]
    if arguments.json:
        output.result("generate", rows)
    for text in texts:
        output.note(f"{arguments.prompt}{text}\n")
    return 0


def _configure_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or of a node")
    parser.add_argument("--data", type=Path, metavar="PATH", help="a file or folder (default: what was held out)")
    parser.add_argument("--field", default="text", help="the field with the text, in files of records (default: text)")
    parser.add_argument("--length", type=int, metavar="T", help="tokens in a window (default: those of the run)")


def _evaluate(arguments: argparse.Namespace, output: Output) -> int:
    """Evaluate, and print the table."""
    from fpld.report.models import open_models

    with output.status():
        losses = api.evaluate_texts(
            open_models(arguments.run), arguments.data, field=arguments.field, length=arguments.length
        )
    what = arguments.data if arguments.data is not None else "held-out text"
    rows = [loss._asdict() for loss in losses]
    size = f"{show_count(losses[0].tokens, 'token')}, {show_count(losses[0].bytes, 'byte')}"
    output.result("evaluate", rows, title=f"{what}: {size}")
    return 0


def _configure_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--to",
        nargs="+",
        choices=(api.HUGGINGFACE, api.GGUF, *FORMATS),
        default=["csv"],
        metavar="FORMAT",
        help=f"{api.HUGGINGFACE}, {api.GGUF}, or of {', '.join(FORMATS)} (default: csv)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the files (default: RUN/export)")
    parser.add_argument("--follow", action="store_true", help="with --to tensorboard: continue until the run has ended")
    model = parser.add_argument_group(f"--to {api.HUGGINGFACE}, --to {api.GGUF}")
    model.add_argument("--best", action="store_true", help="the student of the best round, not of the last")
    model.add_argument("--adapter", action="store_true", help="the LoRA adapters alone, not merged into the model")
    model.add_argument(
        "--license", "--licence", metavar="ID", help="licence of the weights, for the card (such as apache-2.0)"
    )
    model.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to a Hugging Face hub, with HF_TOKEN")
    model.add_argument("--public", action="store_true", help="with --push: for everyone (default: private)")


def _export(arguments: argparse.Namespace, output: Output) -> int:
    """Write, and print what was written."""
    run = api.read_run(arguments.run)
    out = arguments.out if arguments.out is not None else arguments.run / "export"
    formats = list(dict.fromkeys(arguments.to))
    if api.HUGGINGFACE in formats and len(formats) > 1:
        raise InputError(f"--to: {api.HUGGINGFACE} fills a folder of its own: export it by itself")
    if arguments.follow and formats != [TENSORBOARD]:
        raise InputError(f"--follow is for --to {TENSORBOARD} alone")
    if (arguments.push is not None or arguments.public) and formats != [api.HUGGINGFACE]:
        raise InputError(f"--push and --public are for --to {api.HUGGINGFACE} alone")
    model = {"best": arguments.best, "adapter": arguments.adapter, "licence": arguments.license}
    try:
        if arguments.follow:
            out.mkdir(parents=True, exist_ok=True)
            files = {TENSORBOARD: follow_tensorboard(_follow(run), out)}
        else:
            with output.status(), report_elapsed(f"exporting to {out}"):
                files = {name: run.export(out, name, **model) for name in formats}
        rows = [
            {"format": name, "file": str(file), "bytes": file.stat().st_size}
            for name, written in files.items()
            for file in written
        ]
    except OSError as error:
        raise InputError(f"--out: cannot write to {out}: {error.strerror or error}") from None
    what = "Student" if {api.HUGGINGFACE, api.GGUF} & set(formats) else "Trace"
    if arguments.push is not None:
        from fpld.data.hub import push_to_hub

        with output.status(), report_elapsed(f"uploading to {arguments.push}"):
            address = push_to_hub(out, arguments.push, public=arguments.public)
        output.note(f"pushed: {address}")
    output.result("export", rows, title=f"{what} of {run.data.name}: {show_count(len(run.rounds), 'round')}")
    return 0


def _follow(run: api.Run) -> Iterator[RunData]:
    """Yield a run every few seconds, and once more after it has ended."""
    alive = True
    yield run.data
    while alive:
        alive = run_state(run.folder).alive
        if alive:
            time.sleep(FOLLOW_SECONDS)
        yield api.read_run(run.folder).data


GENERATE = Command(_GENERATE_EPILOG, _configure_generate, _generate)
EVALUATE = Command(_EVALUATE_EPILOG, _configure_evaluate, _evaluate)
EXPORT = Command(_EXPORT_EPILOG, _configure_export, _export)
