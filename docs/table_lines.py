"""The lines of each table of results, from the rows that are kept."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from fpld.units import show_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from docs.kept_results import Row

NAMES = {
    "base": "base model, before the federation",
    "best node alone": "best node alone",
    "pooled": "all text pooled, as many steps as one node",
    "pooled-all": "all text pooled, as many steps as all nodes",
    "fedavg": "FedAvg, float32",
    "fedavg-1bit": "FedAvg, one bit per weight",
    "feddf": "FedDF, updates",
    "updates": "fpld, updates",
    "flora": "FLoRA, float32",
    "ensemble": "mixture of the nodes' models (cannot be sent)",
    "fpld": "**fpld**",
}
# What may leave a site, what is done with it, and where that stands: the run (0: of labels alone, 1: of the rest) and
# its method.
POLICY_METHODS = (
    ("nothing", "best node alone", 0, "best node alone"),
    ("labels", "**fpld**", 0, "fpld"),
    ("text and labels", "**fpld**", 1, "fpld"),
    ("updates of weights", "FedAvg, one bit, 2 rounds", 1, "fedavg-1bit, 2 rounds"),
    ("updates of weights", "FedDF, 3 bits", 1, "feddf, 3 bits"),
    ("updates of weights", "**fpld**, 3 bits", 1, "updates, 3 bits"),
    ("weights in float32", "FedAvg, 2 rounds", 1, "fedavg, 2 rounds"),
    ("no bound", "mixture of the nodes' models", 1, "ensemble"),
    ("the text itself", "pooled, steps of all nodes", 1, "pooled-all"),
)
LEAD_METHODS = ("fedavg-1bit", "fedavg", "feddf", "fpld", "updates", "ensemble")
DITHER_SCENES = {"agree": "agree: gain", "tenth": "step/10 apart: gain", "differ": "a step apart: gain"}


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
    head = ["method", rows[0].get("unit", "nats per token"), "difference to fpld", "uplink", "downlink"]
    if any(row.get("windows_se") for row in rows):  # an error that has windows of text as units, not seeds
        for line, row in zip(body, rows, strict=True):
            line.insert(3, "" if row.get("windows_se") is None else f"{row['windows_se']:.3f}")
        head.insert(3, "error by windows")
    return grid(head, body)


def policy_lines(texts: dict[str, list[list[Row]]]) -> list[str]:
    """Return a line for each policy of what may leave a site and each method under it, with a column for each text."""
    body = []
    for policy, name, run, method in POLICY_METHODS:
        rows = [next(row for row in runs[run] if row["method"] == method) for runs in texts.values()]
        losses = [shown(row["heldout_loss"], row["heldout_se"]) for row in rows]
        body.append([policy, name, size(max(row["uplink_bytes"] for row in rows)), *losses])
    return grid(("what may leave a node", "method", "uplink, at most", *texts), body)


def node_lines(rows: list[Row]) -> list[str]:
    """Return what a federation brought each node: its own model's loss before and after."""
    names = "alone", "own", "alone_all", "longer_all", "own_all"
    body = [[row["node"], *(shown(row[name], row[f"{name}_se"]) for name in names)] for row in rows]
    head = ["own text: alone", "own text: after", "all texts: alone", "all texts: alone, as long", "all texts: after"]
    if all("ahead" in row for row in rows):  # of the same model alone for as long
        for line, row in zip(body, rows, strict=True):
            line += [shown(row["ahead"], row["ahead_se"], sign="+"), f"{row['windows_se']:.3f}"]
        head += ["ahead of alone, as long", "error by windows"]
    unit = f"node ({rows[0]['unit']})" if "unit" in rows[0] else "node"
    return grid((unit, *head), body)


def string_lines(rows: list[Row]) -> list[str]:
    """Return a line for each model before, the teacher, and each student over tokens or over strings."""
    body = []
    for row in rows:
        who = f"student {row['student']}" if row["model"] == "student" else row["model"]
        over = "tokens"
        if row["symbols"] is not None:
            over = f"{row['symbols']:,.0f} symbols of {show_count(int(row['symbol_bytes']), 'byte')}"
        marked = ", marked" if row["marked"] == "True" else ""
        labels = "exact" if row["bits"] is None else f"{row['bits']:g} bits"
        learnt = [over + marked, labels] if row["model"] == "student" else ["", ""]
        gain = shown(row["gain"], row["gain_se"]) if "gain" in row else ""
        body.append([who, *learnt, shown(row["loss"], row["loss_se"]), gain])
    return grid(("model", "labels over", "labels", "bits per byte", "gain"), body)


def written_lines(rows: list[Row]) -> list[str]:
    """Return what the text of each node's model took, and what the node's check found in it."""
    body = []
    for row in rows:
        shares = [f"{100 * row[name]:.1f} %" for name in ("copied_share", "replaced_share")]
        body.append([f"`{row['preset']}`", row["node"], f"{row['token_bits']:.2f}", f"{row['note_bits']:.2f}", *shares])
    checked = ("with a run of private tokens, written again", "replaced by public text")
    return grid(("preset", "node", "bits per token", "bits of notes per context", *checked), body)


def student_lines(rows: list[Row]) -> list[str]:
    """Return the lines of students at equal bytes."""
    body = []
    for row in rows:
        behind = "" if row["codec"] == "samples" else shown(row["behind"], row["behind_se"], sign="+")
        loss = shown(row["heldout_loss"], row["heldout_se"])
        body.append([f"{row['megabytes']:g} MB", f"`{row['codec']}`", f"{row['contexts']:,}", loss, behind])
    return grid(("uplink of all nodes", "codec", "contexts", "nats per token", "difference to `samples`"), body)


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


def training_lines(rows: list[Row]) -> list[str]:
    """Return a line for each job of training beside a bare loop."""
    body = [
        [row["job"], f"{row['tokens_per_second']:,.0f}", f"{row['bare_tokens_per_second']:,.0f}", f"{row['ratio']:.2f}"]
        for row in rows
    ]
    return grid(
        ("job", "tokens per second, by the clock", "bare loop, by the clock", "rate to it, of processor time"), body
    )


def _budget(row: Row) -> tuple[str, str]:
    bits = row.get("bits")
    per = row.get("context_bits")
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


def step_lines(rows: list[Row]) -> list[str]:
    """Return the seconds of each kind of work."""
    return grid(("step", "seconds for 512 tokens"), [[row["step"], f"{row['seconds']:.1f}"] for row in rows])


def text_lines(rows: list[Row]) -> list[str]:
    """Return a line for each size of text that was prepared."""
    names = {
        "documents": "documents",
        "seconds": "prepared in, s",
        "mb_per_second": "MB/s",
        "ratio": "rate to `tokenizers`",
        "cpu_ratio": "by processor time",
        "peak_mb": "peak, MB",
        "again_seconds": "second start, s",
        "step_ms": "step, ms",
        "draw_us": "its windows, µs",
        "search_seconds": "search, s",
        "growth_mb": "growth, MB",
        "train_peak_mb": "peak in training, MB",
    }
    there = [name for name in names if any(row[name] is not None for row in rows)]
    body = [[f"{row['mb']:,.0f} MB", *(f"{row[name]:,}" for name in there)] for row in rows]
    return grid(("text", *(names[name] for name in there)), body)


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
    """Return a line for each attack, a column for each rule; with corpus and rounds where they are several."""
    names = list(dict.fromkeys(row["rule"] for row in rows))
    found = {(_where(row), row["attack"], row["rule"]): row for row in rows}
    several = len({_where(row) for row in rows}) > 1
    body = []
    for where, attack in dict.fromkeys((_where(row), row["attack"]) for row in rows):
        cells = [*where, f"`{attack}`"] if several else [f"`{attack}`"]
        for name in names:
            row = found.get((where, attack, name), {})
            worse = f" ({row['worse']:+.3f})" if "worse" in row and attack != "none" else ""
            cells.append(f"{row['nats']:.3f}{worse}" if row else "")
        body.append(cells)
    heads = ("corpus", "rounds", "attackers", "attack") if several else ("attack",)
    return grid((*heads, *(f"`{name}`" for name in names)), body)


def _where(row: Row) -> tuple[str, ...]:
    """Return the federation of a row under attack, as far as it is kept."""
    return tuple(str(row[name]) for name in ("corpus", "rounds", "malicious") if name in row)


def guarded_lines(rows: list[Row]) -> list[str]:
    """Return a line for each attack on a corpus: the mean loss, the worst seed, trust, and a backdoor's success."""
    body = []
    for row in rows:
        attacked = row["attack"] != "none"
        cells = [f"`{row['corpus']}`", str(row["rounds"]), f"`{row['attack']}`", _counted_seeds(row["seeds"])]
        cells += [f"{row['nats']:.3f}", *(f"{row[name]:+.3f}" if attacked else "" for name in ("worse", "worst"))]
        cells += ["" if row["trust"] is None else f"{row['trust']:.2f}", f"{row['backdoor']:.0%}"]
        body.append(cells)
    return grid(("corpus", "rounds", "attack", "seeds", "loss", "worse", "worst seed", "trust", "backdoor"), body)


def poisoned_lines(rows: list[Row]) -> list[str]:
    """Return a line for each attack on updates or on written text."""
    body = []
    for row in rows:
        cells = [f"`{row['corpus']}`", row["rule"], f"`{row['attack']}`", _counted_seeds(row["seeds"])]
        if row["stopped"]:
            body.append([*cells, "the run stops", "", f"{row['backdoor']:.0%}"])
        else:
            worse = f"{row['worse']:+.3f}" if row["attack"] != "none" else ""
            body.append([*cells, f"{row['nats']:.3f}", worse, f"{row['backdoor']:.0%}"])
    return grid(("corpus", "what nodes send", "attack", "seeds", "loss", "worse", "backdoor"), body)


def _counted_seeds(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds))


def claim_lines(rows: list[Row]) -> list[str]:
    """Return the claims of the paper, with our numbers next to its own."""
    body = [[f"`{row['figure']}`", row["statement"], row["paper"], row["measured"]] for row in rows]
    return grid(("simulation", "claim", "paper", "ours"), body)


def dither_lines(rows: list[Row]) -> list[str]:
    """Return KL with independent and with stratified dither, by the number of nodes."""
    found = {(row["scene"], row["K"]): row for row in rows}
    body = []
    for nodes in (row["K"] for row in rows if row["scene"] == "agree"):
        agree = found["agree", nodes]
        gains = [shown(row["ratio"], row["ratio_se"], 2) for row in (found[scene, nodes] for scene in DITHER_SCENES)]
        body.append([f"{nodes}", f"{agree['kl_independent']:.1e}", f"{agree['kl_stratified']:.1e}", *gains])
    return grid(("K", "agree: KL, independent", "agree: KL, stratified", *DITHER_SCENES.values()), body)


def split_lines(rows: list[Row]) -> list[str]:
    """Return the noise of sampled labels by total and policy."""
    found = {(row["total"], row["policy"]): row["noise"] for row in rows}
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    body = []
    for total in dict.fromkeys(row["total"] for row in rows):
        own = [found[total, policy] for policy in policies]
        ratio = found[total, "uniform"] / found[total, "square-root"]
        body.append([f"{total:g}", *(f"{noise:.2e}" for noise in own), f"{ratio:.2f}"])
    return grid(("total", *policies, "uniform / square-root"), body)


def lead_lines(rows: list[Row]) -> list[str]:
    """Return the loss of each method, with a column for each number of local steps."""
    counts = sorted({row["steps"] for row in rows})
    found = {(row["method"].partition(",")[0], row["steps"]): row for row in rows}
    body = []
    for method in LEAD_METHODS:
        own = [found[method, count] for count in counts]
        rounds = [row["method"].partition(", ")[2] for row in own]
        notes = [f" ({note})" if note.endswith(("round", "rounds")) else "" for note in rounds]
        losses = [shown(row["heldout_loss"], row["heldout_se"]) for row in own]
        sent = max(row["uplink_bytes"] for row in own)
        body.append([NAMES.get(method, method), size(sent), *map("".join, zip(losses, notes, strict=True))])
    return grid(("method", "uplink, at most", *(f"{int(count):,} steps" for count in counts)), body)


def tier_lines(rows: list[Row]) -> list[str]:
    """Return what combining in tiers changes, a line for each rule."""
    head = (
        "rule",
        "mean distance of tiers to all at once",
        "largest",
        "all at once, to the honest nodes",
        "in tiers, to the honest nodes",
    )
    names = ("mean", "largest", "flat_to_honest", "tiers_to_honest")
    return grid(head, [[f"`{row['rule']}`", *(f"{row[name]:g}" for name in names)] for row in rows])


def sampling_lines(rows: list[Row]) -> list[str]:
    """Return what asking a part of the nodes costs and brings."""
    body = []
    for row in rows:
        loss = shown(row["heldout_loss"], row["heldout_se"], 4)
        body.append([row["asked"], f"{row['rounds']}", loss, f"{row['up_bytes']:,}"])
    return grid(("asked in a round", "rounds", "held-out loss, nats per token", "up, bytes"), body)


def patch_lines(rows: list[Row]) -> list[str]:
    """Return what a deployment costs with each choice of patches of Flower, and how soon it heals from kills."""
    kinds = [kind for kind in ("node", "superlink", "aggregator") if any(row[f"{kind}_kills"] for row in rows)]
    body = []
    for row in rows:
        healed = [_healed(row[f"{kind}_kills"]) for kind in kinds]
        moved = [f"{row[name] / 1e3:.1f}" for name in ("up_bytes", "down_bytes")]
        processor = [f"{row[name]:.1f}" for name in ("node_cpu", "aggregator_cpu")]
        memory = [f"{row[name]:,.0f}" for name in ("node_mb", "aggregator_mb")]
        fixed = f"{row['fixed_seconds']:.1f}"
        body.append([f"`{row['patches']}`", fixed, *healed, *moved, f"{row['requests']}", *processor, *memory])
    head = (
        "patches",
        "fixed cost, s",
        *(f"healing, {kind}, s" for kind in kinds),
        "up, kB",
        "down, kB",
        "requests",
        "processor, node, s",
        "aggregator, s",
        "memory, node, MB",
        "aggregator, MB",
    )
    return grid(head, body)


def _healed(seconds: list[float | None]) -> str:
    """Return the median and the longest of so many healings."""
    values = sorted(math.inf if value is None else value for value in seconds)
    return f"{statistics.median(values):.0f} (at most {values[-1]:.0f})" if values else ""


LINES: dict[str, Callable[[list[Row]], list[str]]] = {
    "nodes": node_lines,
    "families-nodes": node_lines,
    "strings": string_lines,
    "written": written_lines,
    "equal-bytes": student_lines,
    "privacy": privacy_lines,
    "audits": audit_lines,
    "audit-copies": copies_lines,
    "leakage": leakage_lines,
    "codecs": codec_lines,
    "labels": label_lines,
    "speed": speed_lines,
    "training-speed": training_lines,
    "growth": growth_lines,
    "fleet": fleet_lines,
    "pretrained-steps": step_lines,
    "lead": lead_lines,
    "flower-patches": patch_lines,
    "texts": text_lines,
    "texts-records": text_lines,
    "texts-bytes": text_lines,
    "sampling": sampling_lines,
    "tiers": tier_lines,
    "adaptive": adaptive_lines,
    "refinement": refinement_lines,
    "rules": rule_lines,
    "paper": claim_lines,
    "paper-stratified": dither_lines,
    "paper-labels": split_lines,
    "attack-targets": attack_lines,
    "attack-students": attack_lines,
    "attack-guarded": guarded_lines,
    "attack-poisoned": poisoned_lines,
}


def label(row: Row) -> str:
    """Name a method for a reader."""
    method, _, rounds = row["method"].partition(", ")
    return NAMES.get(method, method) + (f", {rounds}" if rounds else "")


def size(count: int) -> str:
    """Show bytes in megabytes."""
    return f"{count / 1e6:.2f} MB" if count else "0"
