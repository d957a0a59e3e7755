"""Write the results as Markdown: a table with its goals for each row.

    python benchmarks/speed/table.py benchmarks/speed [LINES.jsonl ...]

This adds the runs in these files to results.json, which run.py does for its own, and rewrites results.md. From a run of both
commits (run.py --before) it takes the results of this commit's package, for the rows that show only our jobs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jobs import ROWS, VARIANTS, Found, names_in, ours_beside, units
from workers import read_lines

OURS_ALONE = (2, 3, 5, 6)
"""Rows that a run without peers can fill; if the start is timed, processes must have started alone."""
DESCRIBED = {"plain": "", "dropout": "dropout 0.1", "padded": "padded", "both": "dropout 0.1, padded"}
TRAINING = {
    "ms": ("ms per step", "{:,.1f}"),
    "times": ("times ours", "{:.2f}"),
    "ms_per_layer": ("ms per layer", "{:.3f}"),
    "tokens_per_s": ("target tokens/s", "{:,.0f}"),
    "tflops": ("TFLOP/s", "{:,.1f}"),
    "share": ("of the product's rate", "{:.1%}"),
    "update_ms": ("of it clip and update", "{:.1f}"),
    "gigabytes": ("memory GB", "{:.1f}"),
    "reserved_gigabytes": ("reserved GB", "{:.1f}"),
    "first_s": ("first step s", "{:.1f}"),
    "compile_s": ("less a later one", "{:.1f}"),
    "ready_s": ("s to be ready", "{:.1f}"),
}
DECODING = {
    "sentences_per_s": ("sentences/s", "{:,.1f}"),
    "hf_sentences_per_s": ("HF's", "{:,.1f}"),
    "times": ("times faster", "{:.2f}"),
    "sentences_equal": ("equal sentences", "{}"),
    "sentences": ("of", "{}"),
}


def derive(found: Found) -> Found:
    """The completed measurements, with each system's fraction of the matrix product's rate, and a peer's time relative to
    ours."""
    whole = {name: dict(facts) for name, facts in found.items() if "ms" in facts or "times" in facts}
    product = whole.pop("product", None)
    for name, facts in whole.items():
        if product is not None and "tflops" in facts:
            facts["share"] = facts["tflops"] / product["tflops"]
        ours = whole.get(ours_beside(name) or "")
        if ours is not None:
            facts["times"] = facts["ms"] / ours["ms"]
    return whole


def goals(row: int, found: Found) -> dict[str, float | None]:
    """The values of a row's goals; None if a part is missing."""
    values: dict[str, float | None] = {}
    for goal in ROWS[row].goals:
        try:
            values[goal.text] = goal.value(derive(found))
        except LookupError:
            values[goal.text] = None
    return values


def units_of(run: dict[str, Any]) -> list[tuple[int, str]]:
    """The rows and variants that a run covers."""
    return units(run["rows"], run.get("variants", ["plain"]))


def covering(runs: list[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """The runs that are shown for each row and variant: the last one, and earlier ones with systems that later ones lack."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for run in reversed(runs):
        for row, variant in units_of(run):
            shown = found.setdefault((row, variant), [])
            known = {name for each in shown for name in each["jobs"]}
            if not shown or any(name not in known and "ms" in run["jobs"].get(name, {}) for name in names_in(row, variant)):
                shown.append(run)
    return found


def joined(runs: list[dict[str, Any]]) -> Found:
    """The measurements of runs, from the newest on, each with its ratio to ours in its own run."""
    found: Found = {}
    for run in runs:
        found = {**run["jobs"], **derive(run["jobs"]), **found}
    return found


def markdown(runs: list[dict[str, Any]]) -> str:
    """All rows in order, each from the run that measured it."""
    lines = [
        "# Speed",
        "",
        "Medians of single steps, AdamW included; without dropout and padding unless stated. Dropout 0.1 is on",
        "embeddings, residual branches and attention weights, in translation also after the activation. In a padded batch a",
        "tenth of the tokens are padding, which tokens/s and TFLOP/s do not count. Memory: the peak of what the process",
        "allocated. `ready` counts from the start of the process to the end of its warm-up; only the processes for 10 and 500",
        "layers started alone and with an empty compile cache. GB are 2^30 bytes. `times ours` is the ratio to our time in",
        "the same run:",
        "",
    ]
    measured = covering(runs)
    for run in runs:
        product = run["jobs"].get("product", {})
        rate = f"{product['tflops']:,.0f} TFLOP/s" if "tflops" in product else "not measured"
        lines += [
            f"- {_measured(run, measured)}: `{run['command']}` on {run['hardware']} in {run['seconds']:.0f} s; "
            + ", ".join(f"{name} {version}" for name, version in run["versions"].items())
            + f"; product of 8192 x 8192 matrices in bf16: {rate}"
        ]
    for row in sorted({row for row, _ in measured}):
        found = {variant: joined(measured[row, variant]) for variant in VARIANTS if (row, variant) in measured}
        shown = [each for variant in found for each in measured[row, variant]]
        lines += ["", f"## {row}. {ROWS[row].title}", "", *_table(row, found), ""]
        lines += [f"- {text}: {_shown(value, '{:.3f}')}" for text, value in _best_goals(row, shown).items()]
    return "\n".join(lines) + "\n"


def _best_goals(row: int, runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """The value of each goal from the newest run that has it, among those that the row shows."""
    each = [goals(row, run["jobs"]) for run in runs]
    return {text: next((values[text] for values in each if values[text] is not None), None) for text in each[0]}


def _measured(run: dict[str, Any], measured: dict[tuple[int, str], list[dict[str, Any]]]) -> str:
    """The rows that are shown from this run; single jobs if it measured these."""
    rows: dict[str, list[str]] = {}
    for row, variant in units_of(run):
        if any(each is run for each in measured[row, variant]):
            rows.setdefault(variant, []).append(str(row))
    parts = [f"rows {', '.join(each)}{' with ' if DESCRIBED[name] else ''}{DESCRIBED[name]}" for name, each in rows.items()]
    return "; ".join(parts) or ", ".join(run["jobs"])


def _table(row: int, found: dict[str, Found]) -> list[str]:
    columns = DECODING if row == 9 else TRAINING
    lines = ["| system | " + " | ".join(title for title, _ in columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for variant, jobs in found.items():
        for base, name in zip(ROWS[row].jobs, names_in(row, variant), strict=True):
            reason = jobs.get(name, {"reason": "not run"}).get("reason")
            if reason is not None and reason.startswith(("not run", "not started")):
                continue
            label = base if variant == "plain" else f"{base}, {DESCRIBED[variant]}"
            cells = [_shown(jobs.get(name, {}).get(key), form) for key, (_, form) in columns.items()]
            lines.append(f"| {label if reason is None else f'{label}: {reason}'} | " + " | ".join(cells) + " |")
    return lines


def as_run(path: Path) -> dict[str, Any]:
    """A run in the form of results.json, from its lines; of a job's repetitions, the one with the median time."""
    run, lines = read_lines(path)
    rows = [row for row in run["rows"] if row in OURS_ALONE or not run.get("before")]
    repeated: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["package"] == "this":
            repeated.setdefault(line["job"], []).append(line["facts"])
    jobs: Found = {}
    for name, every in repeated.items():
        whole = sorted((facts for facts in every if "reason" not in facts), key=lambda facts: facts["ms"])
        jobs[name] = dict(whole[(len(whole) - 1) // 2] if whole else every[-1])
        if len(whole) > 1:
            jobs[name]["repeated_ms"] = [round(facts["ms"], 3) for facts in whole]
    hardware = [facts.pop("hardware") for facts in jobs.values() if "hardware" in facts]
    return {
        **{key: value for key, value in run.items() if key != "before"},
        "rows": rows,
        "hardware": hardware[0] if hardware else "unknown hardware",
        "seconds": lines[-1]["seconds"] if lines else 0.0,
        "jobs": jobs,
        "goals": {row: goals(row, jobs) for row in rows},
    }


def add_run(out: Path, run: dict[str, Any]) -> None:
    """Add a run to results.json, replacing an earlier state of itself; runs that are no longer shown are removed."""
    path = out / "results.json"
    others = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = [*(each for each in others if each.get("started") is None or each["started"] != run["started"]), run]
    shown = [each for own in covering(runs).values() for each in own]
    runs = [each for each in runs if not each["rows"] or any(each is one for one in shown)]
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


def write(out: Path, *others: Path) -> None:
    """Add the runs in these files, by default that of the folder `out`, to results.json, and write results.md from it."""
    for path in others or [out / "jobs.jsonl"]:
        add_run(out, as_run(path))
    (out / "results.md").write_text(markdown(json.loads((out / "results.json").read_text())["runs"]))


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


if __name__ == "__main__":
    folder, *files = map(Path, sys.argv[1:])
    if files:
        write(folder, *files)
    else:
        (folder / "results.md").write_text(markdown(json.loads((folder / "results.json").read_text())["runs"]))
