"""The results as Markdown: a table and its goals for each row."""

from __future__ import annotations

from typing import Any

from jobs import ROWS, Found

TRAINING = {
    "ms": ("ms a step", "{:,.1f}"),
    "ms_per_layer": ("ms a layer", "{:.3f}"),
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
    """What was measured to the end, with each system's share of the product's rate."""
    whole = {name: dict(facts) for name, facts in found.items() if "ms" in facts or "times" in facts}
    if (product := whole.pop("product", None)) is not None:
        for facts in whole.values():
            if "tflops" in facts:
                facts["share"] = facts["tflops"] / product["tflops"]
    return whole


def goals(row: int, found: Found) -> dict[str, float | None]:
    """What a row's goals came to; None where a part is missing."""
    values: dict[str, float | None] = {}
    for goal in ROWS[row].goals:
        try:
            values[goal.text] = goal.value(derive(found))
        except LookupError:
            values[goal.text] = None
    return values


def markdown(runs: list[dict[str, Any]]) -> str:
    """All rows in their order, each from the run that measured it."""
    lines = [
        "# Speed",
        "",
        "Medians of single steps, AdamW included, dropout 0, no padding. Memory: the peak of what the process allocated.",
        "`ready` counts from the start of the process to the end of its warm-up; only the processes for 10 and 500 layers",
        "started alone and with an empty compile cache. GB are 2^30 bytes. All systems of a row ran in one run:",
        "",
    ]
    for run in runs:
        product = run["jobs"].get("product", {})
        rate = f"{product['tflops']:,.0f} TFLOP/s" if "tflops" in product else "not measured"
        lines += [
            f"- {_measured(run)}: `{run['command']}` on {run['hardware']} in {run['seconds']:.0f} s; "
            + ", ".join(f"{name} {version}" for name, version in run["versions"].items())
            + f"; product of 8192 x 8192 matrices in bf16: {rate}"
        ]
    measured: dict[int, Found] = {row: run["jobs"] for run in runs for row in run["rows"]}
    for row, found in sorted(measured.items()):
        lines += ["", f"## {row}. {ROWS[row].title}", "", *_table(row, found), ""]
        lines += [f"- {text}: {_shown(value, '{:.3f}')}" for text, value in goals(row, found).items()]
    return "\n".join(lines) + "\n"


def _measured(run: dict[str, Any]) -> str:
    return f"rows {', '.join(map(str, run['rows']))}" if run["rows"] else ", ".join(run["jobs"])


def _table(row: int, found: Found) -> list[str]:
    whole = derive(found)
    names = ROWS[row].jobs
    columns = DECODING if row == 9 else TRAINING
    lines = ["| system | " + " | ".join(title for title, _ in columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        facts = whole.get(name, {})
        reason = found.get(name, {"reason": "not run"}).get("reason")
        label = name if reason is None else f"{name}: {reason}"
        cells = [_shown(facts.get(key), form) for key, (_, form) in columns.items()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
