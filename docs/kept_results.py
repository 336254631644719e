"""Keep in docs/results/ what commands have found: command, commit, machine, seeds and rows, as JSON.

    python -m docs.kept_results rivals runs/rivals       what `fpld run rivals --seeds ...` found
    python -m docs.kept_results adaptive out/results     a study (`make studies`)

What is read, by name:

    a preset's name                                             the folder of `fpld run NAME --seeds`
    nodes, families-nodes                                       that of heterogeneous-models, of families
    equal-bytes, rules, leakage, lead, attack-targets,
    attack-students, attack-guarded, attack-poisoned, codecs,
    labels, strings                                             the folder with the command's CSV
    privacy                                                     that with privacy-*.csv
    paper, paper-stratified, paper-labels                       that with reproduce.json: `fpld reproduce all --json`
    audits, audit-copies                                        folders of `fpld audit`
    adaptive, refinement                                        out/results
    speed, growth, pretrained-steps, flower-patches,
    sampling, tiers                                             out/bench
    training-speed                                              the folder of `fpld bench training --out`
    fleet                                                       the folder of `python -m benchmarks.fleet --out`
    texts, texts-records, texts-bytes                           that of `python -m benchmarks.texts --out`
    written                                                     one with folders of `fpld run PRESET --seeds` in it

`make results` then writes the tables. A file whose rows are rounded says so in a `note`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import statistics
import subprocess
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld.config import read_config
from fpld.paper.reproduce import REPRODUCTIONS
from fpld.protocol.wire import payload_of
from fpld.protocol.written import HEADER as WRITTEN_HEADER
from fpld.storage.run_folder import CONFIG, NODE_STATE, WRITING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEPT = Path(__file__).parent / "results"
ORDER = ("samples", "predictive", "uniform")

Row = dict[str, Any]


def read(name: str) -> Row:
    """Return a kept result."""
    kept: Row = json.loads((KEPT / f"{name}.json").read_text())
    return kept


def take(name: str, folder: Path) -> None:
    """Keep what a command has found, with the commit of the checkout that its folder lies in and the machine."""
    asked = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True)
    found = TAKEN[name](folder) if name in TAKEN else take_runs(name, folder)
    kept = {"command": found.pop("command"), "commit": commit.stdout.strip(), "machine": machine(), **found}
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def machine() -> str:
    """Return this machine in a few words: cores, processor, whether there is a GPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor() or platform.machine()
    gpu = "a GPU" if Path("/dev/nvidia0").exists() else "no GPU"
    return f"{os.cpu_count()} cores ({processor}), {gpu}"


def take_runs(name: str, folder: Path) -> Row:
    """Return what `fpld run --seeds` has found."""
    found: Row = json.loads((folder / "seeds.json").read_text())
    command = f"fpld run {name} --seeds {','.join(map(str, found['seeds']))}"
    changed = (f" --set {key}={value}" for key, value in found.pop("overrides", {}).items())
    return {"command": command + "".join(changed), **found}


def take_nodes(preset: str) -> Callable[[Path], Row]:
    """Return a function that reads what a federation of models that differ brought each node: means over seeds.

    Losses are in the unit of the runs' own table. `ahead` is how far a node's model is ahead of the same model alone
    for as many steps, with an error between seeds and one that has windows of text as units.
    """

    def found(folder: Path) -> Row:
        listed: Row = json.loads((folder / "seeds.json").read_text())
        unit = {key: row[key] for row in listed["rows"][:1] for key in ("unit",) if key in row}
        runs: dict[str, list[Row]] = {}
        for seed in listed["seeds"]:
            for row in _own_models(folder / f"seed-{seed}", by_byte=bool(unit)):
                runs.setdefault(row["node"], []).append(row)
        rows = [{"node": node, **_mean_model(own), **unit} for node, own in runs.items()]
        seeds = ",".join(map(str, listed["seeds"]))
        return {"command": f"fpld run {preset} --seeds {seeds}", "seeds": listed["seeds"], "rows": rows}

    return found


def _own_models(run: Path, *, by_byte: bool) -> list[Row]:
    """Return the rows of own.json with the loss of the same model alone for as long, in bits per byte if asked."""
    table = {row["method"]: row for row in json.loads((run / "result.json").read_text())}
    factor = table["fpld"]["bits_per_byte"] / table["fpld"]["heldout_loss"] if by_byte else 1.0
    rows = []
    for row in json.loads((run / "own.json").read_text()):
        losses = {**row, "longer_all": table[f"alone longer: {row['node']}"]["heldout_loss"]}
        scaled = {name: value * factor for name, value in losses.items() if isinstance(value, float)}
        rows.append({"node": row["node"], **scaled})
    return rows


def _mean_model(runs: list[Row]) -> Row:
    mean: Row = {}
    for name in ("alone", "own", "alone_all", "longer_all", "own_all"):
        mean[name], mean[f"{name}_se"] = mean_and_error([run[name] for run in runs])
    mean["least_gain"] = min(run["alone_all"] - run["own_all"] for run in runs)
    if all("ahead" in run for run in runs):
        mean["ahead"], mean["ahead_se"] = mean_and_error([run["ahead"] for run in runs])
        mean["windows_se"] = math.hypot(*(run["ahead_se"] for run in runs)) / len(runs)
    return mean


def take_strings(folder: Path) -> Row:
    """Return means over seeds of students over tokens and over strings, with the gain over the model before."""
    rows = read_csv(folder / "strings.csv")
    seeds = sorted({int(row["seed"]) for row in rows})
    key = ("model", "student", "symbols", "symbol_bytes", "marked", "bits")
    losses: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        losses.setdefault(tuple(row[name] for name in key), {})[int(row["seed"])] = row["loss"]
    before = {case[0].partition(",")[0]: own for case, own in losses.items() if case[0].endswith(", before")}
    means = []
    for case, own in losses.items():
        mean: Row = dict(zip(key, case, strict=True))
        mean["loss"], mean["loss_se"] = mean_and_error([own[seed] for seed in seeds])
        if mean["model"] == "student":
            gains = [before[mean["student"]][seed] - own[seed] for seed in seeds]
            mean["gain"], mean["gain_se"] = mean_and_error(gains)
        means.append(mean)
    command = f"python -m benchmarks.strings --seeds {','.join(map(str, seeds))} --out out/strings"
    return {"command": command, "seeds": seeds, "rows": means}


def take_written(folder: Path) -> Row:
    """Return what the nodes of runs have written: means over seeds, by preset and node.

    The frames are those that the nodes of a finished run have kept. The first token of a sequence is not coded.
    """
    commands = []
    rows = []
    for path in sorted(folder.glob("*/seeds.json")):
        preset = path.parent.name
        seeds = json.loads(path.read_text())["seeds"]
        commands.append(f"fpld run {preset} --seeds {','.join(map(str, seeds))}")
        config = read_config(path.parent / f"seed-{seeds[0]}" / CONFIG)[0]
        for index, node in enumerate(config.nodes):
            runs = [path.parent / f"seed-{seed}" / "fpld" / "nodes" / str(index) for seed in seeds]
            counts = [_written_counts(run, config.probe.length) for run in runs]
            means = {name: statistics.fmean(count[name] for count in counts) for name in counts[0]}
            rows.append({"preset": preset, "node": node.name, **means})
    return {"command": "`, `".join(commands), "seeds": seeds, "rows": rows}


def _written_counts(node: Path, length: int) -> dict[str, float]:
    """Return the bits of a node's text and notes in its last frame, and what its check has found."""
    from safetensors.numpy import load_file

    frame = load_file(node / NODE_STATE)["frame"]
    _, sequences, text_bytes, notes, _ = WRITTEN_HEADER.unpack_from(payload_of(memoryview(frame.tobytes())))
    row = json.loads((node / WRITING).read_text())[-1]
    return {
        "token_bits": 8 * text_bytes / (sequences * (length - 1)),
        "note_bits": 16 * notes / (sequences * length),
        "copied_share": row["copied"] / row["written"],
        "replaced_share": row["replaced"] / row["sequences"],
    }


def take_students(folder: Path) -> Row:
    """Return means over seeds of students at equal bytes, and how far a codec is behind `samples`, paired by seed."""
    rows = read_csv(folder / "labels.csv")
    losses = {(float(row["megabytes"]), row["codec"], int(row["seed"])): float(row["heldout_loss"]) for row in rows}
    seeds = sorted({seed for *_, seed in losses})
    means = []
    for size, codec in sorted(
        {(size, codec) for size, codec, _ in losses}, key=lambda key: (key[0], ORDER.index(key[1]))
    ):
        own = [losses[size, codec, seed] for seed in seeds]
        behind = [loss - losses[size, "samples", seed] for loss, seed in zip(own, seeds, strict=True)]
        contexts = {int(row["contexts"]) for row in rows if (float(row["megabytes"]), row["codec"]) == (size, codec)}
        found = {"megabytes": size, "codec": codec, "contexts": max(contexts)}
        found |= dict(zip(("heldout_loss", "heldout_se"), mean_and_error(own), strict=True))
        means.append(found | dict(zip(("behind", "behind_se"), mean_and_error(behind), strict=True)))
    runs = " ".join(f"runs/rivals/seed-{seed}" for seed in seeds)
    return {"command": f"python -m benchmarks.labels {runs}", "seeds": seeds, "rows": means}


def take_privacy(folder: Path) -> Row:
    """Return what federations with several promises have found."""
    rows = [row for path in sorted(folder.glob("privacy-*.csv")) for row in read_csv(path)]
    command = "python -m benchmarks.privacy --epsilons inf,8,3,1` and `--preset private-hospitals --epsilons inf,8"
    return {"command": command, "seeds": list(range(int(rows[0]["runs"]))), "rows": rows}


def take_audits(folder: Path) -> Row:
    """Return, for each audit, what its best attack has shown."""
    rows = []
    seeds = []
    for path in sorted(folder.glob("seed-*/audit.json")):
        found = json.loads(path.read_text())
        seeds.append(int(path.parent.name.removeprefix("seed-")))
        rows.append(
            {
                "seed": seeds[-1],
                "epsilon_lower": max(row["epsilon_lower"] for row in found),
                "epsilon_upper": found[0]["epsilon_upper"],
                "aucs": [min(row["auc"] for row in found), max(row["auc"] for row in found)],
                "tpr": max(row["tpr_at_1_percent"] for row in found),
            }
        )
    command = "fpld audit audit --epsilon 3 --seed N --out runs/audits/seed-N"
    return {"command": command, "seeds": seeds, "rows": rows}


def take_copies(folder: Path) -> Row:
    """Return what an audit with repeated canaries has found."""
    copies = json.loads((folder / "canaries.json").read_text())["copies"]
    command = f"fpld audit audit --copies {copies} --out runs/audit"
    return {"command": command, "seeds": [0], "rows": json.loads((folder / "audit.json").read_text())}


def take_study(name: str) -> Callable[[Path], Row]:
    """Return a function that reads what a study has written: its command, seeds and rows."""
    return lambda folder: json.loads((folder / f"{name}.json").read_text())  # type: ignore[no-any-return]


def take_csv(file: str, command: str, seeds: Sequence[int] = (0,)) -> Callable[[Path], Row]:
    """Return a function that reads the CSV of a command."""
    return lambda folder: {"command": command, "seeds": list(seeds), "rows": read_csv(folder / file)}


def take_claims(folder: Path) -> Row:
    """Return the claims of the paper with our numbers, a row for each."""
    rows = [
        {"figure": name, **asdict(claim)}
        for name, reproduction in REPRODUCTIONS.items()
        for claim in reproduction.claims(take_figure(name)(folder)["rows"])
    ]
    return {"command": "fpld reproduce all", "seeds": [0], "rows": rows}


def take_figure(name: str) -> Callable[[Path], Row]:
    """Return a function that reads the rows of one simulation from what `fpld reproduce all --json` has printed."""

    def found(folder: Path) -> Row:
        rows = json.loads((folder / "reproduce.json").read_text())["rows"]
        own = [{key: row[key] for key in row if key != "figure"} for row in rows if row["figure"] == name]
        return {"command": f"fpld reproduce {name}", "seeds": [0], "rows": own}

    return found


def take_rules(folder: Path) -> Row:
    """Return what `python -m benchmarks.rules --json > rules.json` has found, a row for each model."""
    rows = []
    found = json.loads((folder / "rules.json").read_text())["rows"]
    for corpus, seed in dict.fromkeys((row["corpus"], row["seed"]) for row in found):
        own = [row for row in found if (row["corpus"], row["seed"]) == (corpus, seed)]
        nodes = min(row["heldout_loss"] for row in own if row["method"].startswith("node: "))
        key = {"corpus": corpus, "seed": int(seed)}
        for row in own:
            if row["student_loss"] is not None:
                at = key | {"round": row["round"], "rule": row["method"]}
                rows.append(at | {"model": "ensemble", "heldout_loss": row["heldout_loss"]})
                rows.append(at | {"model": "student", "heldout_loss": row["student_loss"]})
        base = next(row["heldout_loss"] for row in own if row["method"] == "base")
        for model, loss in (("base", base), ("best node", nodes)):
            rows.append(key | {"round": 1, "rule": None, "model": model, "heldout_loss": loss})
    seeds = sorted({row["seed"] for row in rows})
    command = f"python -m benchmarks.rules --seeds {','.join(map(str, seeds))}"
    return {"command": f"{command} --rules mean,trimmed,median,mixture", "seeds": seeds, "rows": rows}


def take_attacks(folder: Path, file: str = "attacks.csv") -> Row:
    """Return students under attack, a row for each corpus, number of rounds and of attackers, attack and rule.

    `worse` is how much worse a student is than with honest nodes, and `worst` that of the worst seed. `trust` is the
    largest that an attacker has at the end, and `backdoor` the largest success, over seeds. `stopped` counts the seeds
    in which an attack ended the run: of updates and written text, in poisoned.csv.
    """
    cells: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in read_csv(folder / file):
        key = row["corpus"], int(row["rounds"]), int(row["malicious"]), row["attack"], row["rule"]
        cells.setdefault(key, {})[int(row["seed"])] = row
    means = []
    for key, found in cells.items():
        corpus, rounds, malicious, attack, rule = key
        calm = cells.get((corpus, rounds, malicious, "none", rule), {})
        worse = [row["nats"] - calm[seed]["nats"] for seed, row in found.items() if seed in calm]
        if not worse:
            continue
        means.append(
            {
                "corpus": corpus,
                "rounds": rounds,
                "malicious": malicious,
                "attack": attack,
                "rule": rule,
                "seeds": sorted(seed for seed in found if seed in calm),
                "nats": statistics.mean(row["nats"] for seed, row in found.items() if seed in calm),
                "worse": statistics.mean(worse),
                "worst": max(worse),
                "trust": _attackers_trust(attack, malicious, list(found.values())),
                "backdoor": max(row["backdoor"] for row in found.values()),
                **({"stopped": sum(int(row["stopped"]) for row in found.values())} if file == "poisoned.csv" else {}),
            }
        )
    order = {corpus: place for place, corpus in enumerate(dict.fromkeys(row["corpus"] for row in means))}
    means.sort(key=lambda row: (order[row["corpus"]], row["rounds"], row["malicious"]))
    names = ",".join(dict.fromkeys(row["rule"] for row in means))
    command = f"python -m benchmarks.byzantine --out out --corpus CORPUS --seed N --rules {names}"
    if file == "poisoned.csv":
        command = "python -m benchmarks.poisoned --out out --corpus CORPUS --seed N"
    return {"command": command, "seeds": sorted({seed for row in means for seed in row["seeds"]}), "rows": means}


def _attackers_trust(attack: str, malicious: int, rows: Sequence[Row]) -> float | None:
    """Return the largest trust of an attacker; None where nobody attacks or the rule has no trust."""
    if attack in {"none", "without"} or any(not row["trust"] for row in rows):
        return None
    return max(float(value) for row in rows for value in str(row["trust"]).split()[-malicious:])


def read_csv(path: Path) -> list[Row]:
    """Return the rows of a CSV, numbers as numbers."""
    with path.open(newline="") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> float | str | None:
    """Return a number of a table, None where it is missing or infinite, which JSON has not; words as they are."""
    try:
        number = float(text or "inf")
    except ValueError:
        return text
    return number if math.isfinite(number) else None


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return a mean and its standard error."""
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


CODECS = "fpld bench codecs --peers benchmarks.peers --scene gaussian zipf zipf-peaked students-1 students-3"
TAKEN: dict[str, Callable[[Path], Row]] = {
    "nodes": take_nodes("heterogeneous-models"),
    "families-nodes": take_nodes("families"),
    "strings": take_strings,
    "written": take_written,
    "equal-bytes": take_students,
    "privacy": take_privacy,
    "audits": take_audits,
    "audit-copies": take_copies,
    "adaptive": take_study("adaptive"),
    "refinement": take_study("refinement"),
    "rules": take_rules,
    "paper": take_claims,
    "paper-stratified": take_figure("stratified"),
    "paper-labels": take_figure("labels"),
    "speed": take_study("speed"),
    "training-speed": take_csv("bench-training.csv", "fpld bench training --config runs/rivals --steps 64 --repeat 3"),
    "growth": take_study("growth"),
    "fleet": take_study("fleet"),
    "pretrained-steps": take_study("pretrained-steps"),
    "flower-patches": take_study("flower-patches"),
    "texts": take_study("texts"),
    "texts-records": take_study("texts-records"),
    "texts-bytes": take_study("texts-bytes"),
    "sampling": take_study("sampling"),
    "tiers": take_study("tiers"),
    "lead": take_csv("lead.csv", "python -m benchmarks.lead --out out/lead"),
    "codecs": take_csv("bench-codecs.csv", f"{CODECS} --bits 0.02,0.05,0.1,0.25,0.5,1,2,4"),
    "labels": take_csv(
        "bench-codecs.csv", "fpld bench codecs --scene students-1 students-3 large --context-bits 10,30,60,100,300"
    ),
    "leakage": take_csv("leakage.csv", "python -m benchmarks.leakage runs/audit --out out"),
    "attack-targets": take_csv("targets.csv", "python -m benchmarks.byzantine --out out --targets"),
    "attack-students": take_attacks,
    "attack-guarded": take_attacks,
    "attack-poisoned": partial(take_attacks, file="poisoned.csv"),
}


def main() -> None:
    """Keep a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the result")
    parser.add_argument("folder", type=Path, help="that the command has written")
    given = parser.parse_args()
    take(given.name, given.folder)


if __name__ == "__main__":
    main()
