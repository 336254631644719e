"""Write the tables of README and docs from results that are kept in docs/results/.

    make results                    the tables and their figures again
    python -m docs.make_tables      the tables

A table stands between `<!-- table NAME -->` and `<!-- end -->`. A kept run of a preset that no page names is one more
table of docs/results.md. The line below a table says command, commit, machine and seeds. docs/kept_results.py keeps
results.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from pathlib import Path

from docs import kept_results
from docs.kept_results import Row, read
from docs.table_lines import LINES, policy_lines, run_lines

DOCS = Path(__file__).parent
PAGES = (
    DOCS.parent / "README.md",
    *(
        DOCS / f"{name}.md"
        for name in ("results", "results-huggingface", "paper", "scale", "attacks", "flower", "hardware", "running")
    ),
)
OTHERS = "others"  # the name of the place for runs that no page names
POLICIES = "policies-of-sites"  # the table of what may leave a site, from the runs below
# Each text with its run of labels on public text alone, and its run of the other policies.
POLICY_RUNS = {
    "presidents": ("rivals", "policies"),
    "Wikipedia": ("wikipedia-labels", "wikipedia"),
    "hospitals": ("hospitals-labels", "hospitals"),
}
_TABLE = re.compile(r"(<!-- table ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(name: str) -> str:
    """Return a table, and below it the command, commit, seeds and machine that it is from."""
    if name == OTHERS:
        return "\n".join(f"### {title(other)} {{#{other}}}\n\n{table(other)}" for other in others())
    if name == POLICIES:
        return policy_table()
    full, _, scene = name.partition("--")
    kept = read(full)
    rows = [row for row in kept["rows"] if not scene or row["scene"] == scene]
    lines = LINES.get(full, run_lines)(rows)
    return "\n".join([*lines, "", source(kept, full), ""])


def policy_table() -> str:
    """Return what each policy of what may leave a site gives on each text, and the runs that say so."""
    runs = {text: [read(name) for name in names] for text, names in POLICY_RUNS.items()}
    lines = policy_lines({text: [kept["rows"] for kept in both] for text, both in runs.items()})
    commands = [f"`{kept['command']}` at {kept['commit']}" for both in runs.values() for kept in both]
    text = f"Seeds 0, 1, 2: means with standard errors. {', '.join(commands)}."
    return "\n".join([*lines, "", textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False), ""])


def source(kept: Row, name: str) -> str:
    """Say where a table is from."""
    seeds = kept["seeds"]
    said = f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    if (name not in LINES and len(seeds) > 1) or name in ("equal-bytes", "adaptive", "refinement"):
        said += ": means with standard errors, differences paired by seed"
    text = f"{said}. `{kept['command']}` at {kept['commit']}, {kept['machine']}."
    text += f" {kept['note']}" if "note" in kept else ""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def others() -> list[str]:
    """Return the kept runs that docs/results.md does not name."""
    named = {name for _, name, _ in _TABLE.findall((DOCS / "results.md").read_text())}
    kept = (path.stem for path in sorted(kept_results.KEPT.glob("*.json")))
    return [name for name in kept if name not in named and _is_run(name)]


def _is_run(name: str) -> bool:
    kept = read(name)
    return "rows" in kept and all("method" in row for row in kept["rows"])


def title(preset: str) -> str:
    """Return what the first comment of a preset calls it."""
    text = (DOCS.parent / "experiments" / f"{preset}.toml").read_text()
    tomllib.loads(text)
    return re.split(r"[.:;]", text.splitlines()[0].lstrip("# "), maxsplit=1)[0]


def rendered(text: str) -> str:
    """Return a page with its tables as kept."""
    return _TABLE.sub(lambda match: match[1] + table(match[2]) + match[3], text)


def main() -> None:
    """Write the tables."""
    for page in PAGES:
        page.write_text(rendered(page.read_text()))


if __name__ == "__main__":
    main()
