"""Make two tasks for lm-evaluation-harness from a folder of text, without a network: perplexity and a cloze.

    python examples/lm_eval/make_tasks.py my-texts --out tasks
    lm_eval --model hf --model_args pretrained=./student --include_path tasks --tasks fpld_text,fpld_cloze

`fpld_text` is the text as one stream, with an empty line after each document. So does `fpld evaluate` read it for a
student without an end-of-text token: `bits_per_byte` of both programs is the same number. For a student with one,
`fpld evaluate` puts that token after each document instead, so the two numbers differ.
`fpld_cloze` asks for the last word of a sentence, among words of the same text.
"""

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

from fpld.data import read_documents

CHOICES = 4
SENTENCE = re.compile(r"[A-Z][^.!?]{40,200}[.!?]")
WORD = re.compile(r"[a-z]{4,}")

TEXT_TASK = """\
task: fpld_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: bits_per_byte}}
  - {{metric: byte_perplexity}}
metadata: {{version: 1.0}}
"""
CLOZE_TASK = """\
task: fpld_cloze
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc}}
metadata: {{version: 1.0}}
"""


def cloze(text: str, questions: int, seed: int) -> list[dict[str, Any]]:
    """Return sentences without their last word, which is one of `CHOICES` words: the others are drawn from the text."""
    draw = random.Random(seed)  # noqa: S311  # the same questions on every machine
    words = sorted(set(WORD.findall(text)))
    sentences = SENTENCE.findall(" ".join(text.split()))
    draw.shuffle(sentences)
    asked: list[dict[str, Any]] = []
    for sentence in sentences:
        if len(asked) == questions or len(words) < CHOICES:
            break
        context, _, last = sentence[:-1].rpartition(" ")
        if not WORD.fullmatch(last):
            continue
        # One more than are wanted, since the answer may be among them.
        others = [word for word in draw.sample(words, CHOICES) if word != last]
        choices = [last, *others[: CHOICES - 1]]
        draw.shuffle(choices)
        asked.append({"context": context, "choices": choices, "answer": choices.index(last)})
    return asked


def make_tasks(texts: Path, out: Path, *, questions: int = 200, seed: int = 0) -> None:
    """Write the tasks, each a YAML file with its data beside it."""
    stream = "".join(f"{document.text}\n\n" for document in read_documents(texts))
    out.mkdir(parents=True, exist_ok=True)
    for name, task, rows in (
        ("text", TEXT_TASK, [{"text": stream}]),
        ("cloze", CLOZE_TASK, cloze(stream, questions, seed)),
    ):
        if not rows:
            raise SystemExit(f"{texts}: no sentence ends in a word of four letters or more")
        data = out / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        (out / f"fpld_{name}.yaml").write_text(task.format(data=data.resolve().as_posix()), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="a file or a folder of text")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tasks")
    parser.add_argument("--questions", type=int, default=200, help="of the cloze, at most (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the words to choose among (default: 0)")
    given = parser.parse_args()
    make_tasks(given.texts, given.out, questions=given.questions, seed=given.seed)
