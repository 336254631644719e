"""Write the tables of README and docs/results.md from results that are kept in docs/results/.

    make results                                                 the tables and their figures again
    python docs/make_tables.py --take rivals runs/rivals         first keep what `fpld run rivals --seeds ...` found
    python docs/make_tables.py --take adaptive out/results       first keep a study (`make studies`)

What `--take` reads, by name: a preset's name: the folder of `fpld run NAME --seeds`; `equal-bytes`, `rules`, `leakage`,
`attack-targets`, `attack-students`, `codecs`, `labels`: the folder with the command's CSV; `privacy`: that with
privacy-*.csv; `audits`, `audit-copies`: folders of `fpld audit`; `adaptive`, `refinement`: out/results;
`speed`, `growth`: out/bench; `fleet`: the folder of `python -m benchmarks.fleet --out`.

A table stands between `<!-- table NAME -->` and `<!-- end -->`. A kept run of a preset that no page names is one more
table of docs/results.md. Every file has command, commit, machine, seeds and rows; the line below a table says them.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import re
import statistics
import subprocess
import textwrap
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DOCS = Path(__file__).parent
KEPT = DOCS / "results"
PAGES = (DOCS.parent / "README.md", DOCS / "results.md", DOCS / "results-huggingface.md", DOCS / "scale.md")
NAMES = {
    "base": "base model, before the federation",
    "best node alone": "best node alone",
    "pooled": "all text pooled, as many steps as one node",
    "fedavg": "FedAvg, float32",
    "fedavg-1bit": "FedAvg, one bit per weight",
    "flora": "FLoRA, float32",
    "ensemble": "mixture of the nodes' models (cannot be sent)",
    "fpld": "**fpld**",
}
ORDER = ("samples", "predictive", "uniform")
OTHERS = "others"  # the name of the place for runs that no page names
SHORT = "-short"  # the end of a name: the same run, with the best of each rival
_TABLE = re.compile(r"(<!-- table ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]


# ---- what is kept


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
    return {"command": f"fpld run {name} --seeds {','.join(map(str, found['seeds']))}", **found}


def take_nodes(folder: Path) -> Row:
    """Return means over seeds of what a federation of models that differ brought each node."""
    found: Row = json.loads((folder / "seeds.json").read_text())
    rows: dict[str, list[Row]] = {}
    for seed in found["seeds"]:
        run = folder / f"seed-{seed}"
        table = {row["method"]: row["heldout_loss"] for row in json.loads((run / "result.json").read_text())}
        for row in json.loads((run / "own.json").read_text()):
            rows.setdefault(row["node"], []).append(row | {"longer_all": table[f"alone longer: {row['node']}"]})
    means = []
    for node, runs in rows.items():
        mean: Row = {"node": node}
        for name in ("alone", "own", "alone_all", "longer_all", "own_all"):
            mean[name], mean[f"{name}_se"] = mean_and_error([run[name] for run in runs])
        gains = [run["alone_all"] - run["own_all"] for run in runs]
        mean["least_gain"] = min(gains)
        means.append(mean)
    listed = ",".join(map(str, found["seeds"]))
    return {"command": f"fpld run heterogeneous-models --seeds {listed}", "seeds": found["seeds"], "rows": means}


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
    rows, seeds = [], []
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


def take_rules(folder: Path) -> Row:
    """Return what `python -m benchmarks.rules --json > rules.json` has found, a row for each model."""
    rows, found = [], json.loads((folder / "rules.json").read_text())["rows"]
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


def take_attacks(folder: Path) -> Row:
    """Return students under attack: means over seeds, and how much worse they are than with honest nodes."""
    rows = read_csv(folder / "attacks.csv")
    seeds = sorted({int(row["seed"]) for row in rows})
    nats = {(int(row["seed"]), row["attack"], row["rule"]): float(row["nats"]) for row in rows}
    cells = list(dict.fromkeys((attack, rule) for _, attack, rule in nats))
    means = [
        {
            "attack": attack,
            "rule": rule,
            "nats": statistics.mean(nats[seed, attack, rule] for seed in seeds),
            "worse": statistics.mean(nats[seed, attack, rule] - nats[seed, "none", rule] for seed in seeds),
        }
        for attack, rule in cells
    ]
    command = "python -m benchmarks.byzantine --out out --seed N --rules guarded,mixture,mean"
    return {"command": command, "seeds": seeds, "rows": means}


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
    "nodes": take_nodes,
    "equal-bytes": take_students,
    "privacy": take_privacy,
    "audits": take_audits,
    "audit-copies": take_copies,
    "adaptive": take_study("adaptive"),
    "refinement": take_study("refinement"),
    "rules": take_rules,
    "speed": take_study("speed"),
    "growth": take_study("growth"),
    "fleet": take_study("fleet"),
    "codecs": take_csv("bench-codecs.csv", f"{CODECS} --bits 0.02,0.05,0.1,0.25,0.5,1,2,4"),
    "labels": take_csv(
        "bench-codecs.csv", "fpld bench codecs --scene students-1 students-3 large --context-bits 10,30,60,100,300"
    ),
    "leakage": take_csv("leakage.csv", "python -m benchmarks.leakage runs/audit --out out"),
    "attack-targets": take_csv("targets.csv", "python -m benchmarks.byzantine --out out --targets"),
    "attack-students": take_attacks,
}


# ---- tables


def read(name: str) -> Row:
    """Return a kept result."""
    kept: Row = json.loads((KEPT / f"{name}.json").read_text())
    return kept


def table(name: str) -> str:
    """Return a table, and below it the command, commit, seeds and machine that it is from."""
    if name == OTHERS:
        return "\n".join(f"### {title(other)} {{#{other}}}\n\n{table(other)}" for other in others())
    full, _, scene = name.removesuffix(SHORT).partition("--")
    kept = read(full)
    rows = [row for row in kept["rows"] if not scene or row["scene"] == scene]
    lines = LINES.get(full, run_lines)(shortened(rows) if name.endswith(SHORT) else rows)
    return "\n".join([*lines, "", source(kept, full), ""])


def source(kept: Row, name: str) -> str:
    """Say where a table is from."""
    seeds = kept["seeds"]
    said = f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    if (name not in LINES and len(seeds) > 1) or name in ("equal-bytes", "adaptive", "refinement"):
        said += ": means with standard errors, differences paired by seed"
    text = f"{said}. `{kept['command']}` at {kept['commit']}, {kept['machine']}."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def others() -> list[str]:
    """Return the kept runs that docs/results.md does not name."""
    named = {name for _, name, _ in _TABLE.findall((DOCS / "results.md").read_text())}
    kept = (path.stem for path in sorted(KEPT.glob("*.json")))
    return [name for name in kept if name not in named and _is_run(name)]


def _is_run(name: str) -> bool:
    kept = read(name)
    return "rows" in kept and all("method" in row for row in kept["rows"])


def title(preset: str) -> str:
    """Return what the first comment of a preset calls it."""
    text = (DOCS.parent / "experiments" / f"{preset}.toml").read_text()
    tomllib.loads(text)
    return re.split(r"[.:;]", text.splitlines()[0].lstrip("# "), maxsplit=1)[0]


def grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body)]


def shown(value: float, error: float | None, digits: int = 3, sign: str = "") -> str:
    """Write a number with its standard error."""
    text = f"{value:{sign}.{digits}f}"
    return text if error is None or math.isnan(error) else f"{text} ± {error:.{digits}f}"


def run_lines(rows: list[Row]) -> list[str]:
    """Return the lines of methods side by side."""
    rows = sorted(rows, key=lambda row: -row["heldout_loss"])
    body = [
        [
            label(row),
            shown(row["heldout_loss"], row["heldout_se"]),
            "" if row["method"] == "fpld" else shown(row["behind"], row["behind_se"], sign="+"),
            size(row["uplink_bytes"]),
            size(row["downlink_bytes"]),
        ]
        for row in rows
    ]
    head = ["method", "nats per token", "behind fpld", "uplink", "downlink"]
    if any(row.get("windows_se") for row in rows):  # an error that has windows of text as units, not seeds
        for line, row in zip(body, rows, strict=True):
            line.insert(3, "" if row.get("windows_se") is None else f"{row['windows_se']:.3f}")
        head.insert(3, "error by windows")
    return grid(head, body)


def node_lines(rows: list[Row]) -> list[str]:
    """Return what a federation brought each node: its own model's loss before and after."""
    names = "alone", "own", "alone_all", "longer_all", "own_all"
    body = [[row["node"], *(shown(row[name], row[f"{name}_se"]) for name in names)] for row in rows]
    head = ("own text: alone", "own text: after", "all texts: alone", "all texts: alone, as long", "all texts: after")
    return grid(("node", *head), body)


def shortened(rows: list[Row]) -> list[Row]:
    """Return the rows of a run with each rival at its best number of rounds."""
    kinds: dict[str, Row] = {}
    for row in rows:
        kind = row["method"].partition(", ")[0]
        kinds[kind] = min(kinds.get(kind, row), row, key=lambda each: each["heldout_loss"])
    return list(kinds.values())


def student_lines(rows: list[Row]) -> list[str]:
    """Return the lines of students at equal bytes."""
    body = []
    for row in rows:
        behind = "" if row["codec"] == "samples" else shown(row["behind"], row["behind_se"], sign="+")
        loss = shown(row["heldout_loss"], row["heldout_se"])
        body.append([f"{row['megabytes']:g} MB", f"`{row['codec']}`", f"{row['contexts']:,}", loss, behind])
    return grid(("uplink of all nodes", "codec", "contexts", "nats per token", "behind `samples`"), body)


def privacy_lines(rows: list[Row]) -> list[str]:
    """Return the lines of federations with several promises."""
    body = []
    for row in rows:
        losses = [f"{row[name]:.4f}" for name in ("base", "best_alone", "mean_alone", "fpld")]
        promise = "none" if row["epsilon"] is None else f"{row['epsilon']:g}"
        body.append([f"`{row['preset']}`", row["unit"], promise, *losses])
    return grid(("preset", "unit", "epsilon", "base", "best node alone", "nodes alone, mean", "student"), body)


def audit_lines(rows: list[Row]) -> list[str]:
    """Return the lines of audits."""
    body = []
    for row in rows:
        low, high = row["aucs"]
        bounds = [f"{row['epsilon_lower']:.2f}", f"{row['epsilon_upper']:.2f}"]
        body.append([f"{row['seed']}", *bounds, f"{low:.2f} to {high:.2f}", f"{row['tpr']:.2f}"])
    return grid(("seed", "epsilon at least", "epsilon at most", "AUC of the attacks", "best TPR at 1 % FPR"), body)


def copies_lines(rows: list[Row]) -> list[str]:
    """Return a line for each attack of an audit."""
    body = [
        [
            row["canaries"],
            row["attack"],
            f"{row['auc']:.2f} ({row['auc_low']:.2f} to {row['auc_high']:.2f})",
            f"{row['tpr_at_1_percent']:.2f} ({row['tpr_low']:.2f} to {row['tpr_high']:.2f})",
            f"{row['epsilon_lower']:.1f}",
        ]
        for row in rows
    ]
    return grid(("canaries", "attack", "AUC (95 %)", "TPR at 1 % FPR (95 %)", "epsilon at least"), body)


def leakage_lines(rows: list[Row]) -> list[str]:
    """Return the AUC of each attack by codec and bits."""
    panels = (("probe", "labels"), ("probe", "surrogate"), ("text", "surrogate"))
    found = {(row["codec"], row["context_bits"], row["canaries"], row["attack"]): row["auc"] for row in rows}
    sent = sorted({(codec, bits) for codec, bits, *_ in found}, key=lambda pair: (-pair[1], pair[0]))
    body = [[f"`{codec}`", f"{bits:,g}", *(f"{found[codec, bits, *p]:.2f}" for p in panels)] for codec, bits in sent]
    return grid(("codec", "bits per context", *(f"{kind} canaries, by {attack}" for kind, attack in panels)), body)


def codec_lines(rows: list[Row]) -> list[str]:
    """Return KL by codec and bits; a dash where the budget is below what the codec needs."""
    budgets = sorted({row["bits"] for row in rows})
    found = {(row["codec"], row["bits"]): row["kl"] for row in rows}
    names = list(dict.fromkeys(row["codec"] for row in rows))
    body = []
    for name in names:
        cells = [found.get((name, bits)) for bits in budgets]
        body.append([f"`{name}`" if name != "limit" else name, *("-" if kl is None else f"{kl:.2g}" for kl in cells)])
    return grid(("codec", *(f"{bits:g}" for bits in budgets)), body)


def label_lines(rows: list[Row]) -> list[str]:
    """Return noise and slope of the mean target by codec and bits per context."""
    budgets = sorted({row["context_bits"] for row in rows})
    found = {(row["scene"], row["codec"], row["context_bits"]): row for row in rows}
    body = []
    for scene, codec in dict.fromkeys((row["scene"], row["codec"]) for row in rows):
        own = [found.get((scene, codec, bits), {"noise": None}) for bits in budgets]
        cells = ["-" if r["noise"] is None else f"{r['noise']:.2g}; {shown(r['slope'], r['slope_se'])}" for r in own]
        body.append([scene, f"`{codec}`", *cells])
    return grid(("scene", "codec", *(f"{bits:g}" for bits in budgets)), body)


def speed_lines(rows: list[Row]) -> list[str]:
    """Return a line for each codec and budget, a column for each operation."""
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    found = {(*_budget(row), row["operation"]): row["ratio"] for row in rows}
    body = []
    for codec, bits in dict.fromkeys(_budget(row) for row in rows):
        cells = [found.get((codec, bits, operation)) for operation in operations]
        body.append([f"`{codec}`", bits, *("" if ratio is None else f"{ratio:.2g}" for ratio in cells)])
    return grid(("codec", "bits", *operations), body)


def _budget(row: Row) -> tuple[str, str]:
    bits, per = row.get("bits"), row.get("context_bits")
    return row["codec"], f"{bits:g}" if bits is not None else f"{per:g} per context"


def growth_lines(rows: list[Row]) -> list[str]:
    """Return a line for each size of a round."""
    names = ("coding_ms", "checking_ms", "combining_ms", "processor_ms", "all_seconds", "frames_mb", "peak_mb")
    body = [
        [row["rule"], *(f"{row[name]:,}" for name in ("nodes", "contexts", "vocab")), *(f"{row[n]:g}" for n in names)]
        for row in rows
    ]
    units = ("coding, ms", "checking, ms", "combining, ms", "processor, ms", "all, s", "frames, MB", "peak, MB")
    return grid(("rule", "K", "m", "V", *units), body)


def fleet_lines(rows: list[Row]) -> list[str]:
    """Return a line for each number of nodes over a real SuperLink."""
    names = {
        "collect_seconds": "collecting, s",
        "spread_seconds": "first to last answer, s",
        "combine_seconds": "combining, s",
        "serverapp_cpu": "processor of the aggregator, s",
        "superlink_cpu": "of the SuperLink, s",
        "frames_mb": "frames, MB",
        "serverapp_mb": "memory of the aggregator, MB",
        "superlink_mb": "of the SuperLink, MB",
        "nodes_mb": "of all nodes, MB",
    }
    digits = {name: 2 if name == "frames_mb" else 0 if name.endswith("_mb") else 1 for name in names}
    body = []
    for row in rows:
        cells = [f"{row[name]:,.{digits[name]}f}" if row[name] else "" for name in names]
        body.append([row["kind"], f"{row['nodes']:,}", *cells])
    return grid(("nodes are", "K", *names.values()), body)


def adaptive_lines(rows: list[Row]) -> list[str]:
    """Return the ways to share out one total."""
    body = []
    for row in rows:
        bits = ", ".join(f"{each:.2f}" for each in row["bits"])
        values = [shown(row[name], row[f"{name}_se"], 2) for name in ("kl_1e3", "gain")]
        losses = [
            shown(row["heldout_loss"], row["heldout_loss_se"], 4),
            shown(row["behind"], row["behind_se"], 4, "+"),
        ]
        body.append([row["allocation"], bits, *values, *losses])
    head = ("allocation", "bits per coordinate", "KL, 1e-3 nats", "gain over uniform", "nats per token", "to uniform")
    return grid(head, body)


def refinement_lines(rows: list[Row]) -> list[str]:
    """Return refinement and its rivals round by round."""
    body = []
    for row in rows:
        pairs = zip(row["kl_1e3"], row["kl_1e3_se"], strict=True)
        kl = [shown(value, error, 2) if value else "0" for value, error in pairs]
        losses = [
            shown(row["heldout_loss"], row["heldout_loss_se"], 4),
            shown(row["behind"], row["behind_se"], 4, "+"),
        ]
        body.append([row["models"], row["scheme"], f"{row['bits']:g}", *kl, *losses])
    rounds = [f"KL {number + 1}" for number in range(len(rows[0]["kl_1e3"]))]
    return grid(("models", "scheme", "bits a round", *rounds, "nats per token", "to float32"), body)


def rule_lines(rows: list[Row]) -> list[str]:
    """Return the losses of ensembles and students by rule; the best of each in bold."""
    found = {(r["corpus"], r["seed"], r["round"], r["model"], r["rule"]): r["heldout_loss"] for r in rows}
    names = list(dict.fromkeys(row["rule"] for row in rows if row["rule"]))
    body = []
    for corpus, seed, number in dict.fromkeys((row["corpus"], row["seed"], row["round"]) for row in rows):
        line = [f"`{corpus}`", f"{seed}", f"{number}"]
        line += [_cell(found.get((corpus, seed, number, who, None))) for who in ("base", "best node")]
        for model in ("ensemble", "student"):
            own = [found.get((corpus, seed, number, model, name)) for name in names]
            best = min(loss for loss in own if loss is not None)
            line += [f"**{_cell(loss)}**" if loss == best else _cell(loss) for loss in own]
        body.append(line)
    heads = [f"{model}: {name}" for model in ("ensemble", "student") for name in names]
    return grid(("corpus", "seed", "round", "base", "best node", *heads), body)


def _cell(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.3f}"


def attack_lines(rows: list[Row]) -> list[str]:
    """Return a line for each attack, a column for each rule."""
    names = list(dict.fromkeys(row["rule"] for row in rows))
    found = {(row["attack"], row["rule"]): row for row in rows}
    body = []
    for attack in dict.fromkeys(row["attack"] for row in rows):
        cells = [f"`{attack}`"]
        for name in names:
            row = found[attack, name]
            worse = f" ({row['worse']:+.3f})" if "worse" in row and attack != "none" else ""
            cells.append(f"{row['nats']:.3f}{worse}")
        body.append(cells)
    return grid(("attack", *(f"`{name}`" for name in names)), body)


LINES: dict[str, Callable[[list[Row]], list[str]]] = {
    "nodes": node_lines,
    "equal-bytes": student_lines,
    "privacy": privacy_lines,
    "audits": audit_lines,
    "audit-copies": copies_lines,
    "leakage": leakage_lines,
    "codecs": codec_lines,
    "labels": label_lines,
    "speed": speed_lines,
    "growth": growth_lines,
    "fleet": fleet_lines,
    "adaptive": adaptive_lines,
    "refinement": refinement_lines,
    "rules": rule_lines,
    "attack-targets": attack_lines,
    "attack-students": attack_lines,
}


def label(row: Row) -> str:
    """Name a method for a reader."""
    method, _, rounds = row["method"].partition(", ")
    return NAMES.get(method, method) + (f", {rounds}" if rounds else "")


def size(count: int) -> str:
    """Show bytes in megabytes."""
    return f"{count / 1e6:.2f} MB" if count else "0"


def rendered(text: str) -> str:
    """Return a page with its tables as kept."""
    return _TABLE.sub(lambda match: match[1] + table(match[2]) + match[3], text)


def main() -> None:
    """Take results, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", nargs=2, action="append", default=[], metavar=("NAME", "FOLDER"))
    for name, folder in parser.parse_args().take:
        take(name, Path(folder))
    for page in PAGES:
        page.write_text(rendered(page.read_text()))


if __name__ == "__main__":
    main()
