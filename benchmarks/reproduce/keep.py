"""Keep the results of reproductions in this folder: their found.json, with one run a line and without the folders of the runs.

python benchmarks/reproduce/keep.py OUT/NAME/found.json... [--earlier FILE] [--note TEXT]

--earlier: a file with runs of an earlier session; those that were not asked for yet are kept too, for the next one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kilolayer.reproduce.lab import earlier_runs

HERE = Path(__file__).parent


def text_of(value: Any, depth: int = 0) -> str:
    """JSON in which runs and other small things take one line each."""
    if isinstance(value, dict) and depth < 3 and "outcome" not in value:
        entries = [f"{' ' * (depth + 1)}{json.dumps(key)}: {text_of(each, depth + 1)}" for key, each in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{' ' * depth}}}" if entries else "{}"
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        entries = [f"{' ' * (depth + 1)}{json.dumps(each)}" for each in value]
        return "[\n" + ",\n".join(entries) + f"\n{' ' * depth}]"
    return json.dumps(value)


def without_folders(value: Any) -> Any:
    match value:
        case dict():
            return {key: without_folders(each) for key, each in value.items() if key != "folder"}
        case list():
            return [without_folders(each) for each in value]
        case float():
            return float(f"{value:.5g}")
        case _:
            return value


def options_in(value: Any) -> Iterator[Any]:
    """The options of every run in a value."""
    match value:
        case {"options": options, "outcome": _}:
            yield options
        case dict() | list():
            for each in value.values() if isinstance(value, dict) else value:
                yield from options_in(each)
        case _:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("found", type=Path, nargs="+")
    parser.add_argument("--note", default="")
    parser.add_argument("--earlier", type=Path)
    options = parser.parse_args()
    earlier = () if options.earlier is None else earlier_runs(options.earlier)
    for path in options.found:
        document = without_folders(json.loads(path.read_text()))
        asked = list(options_in(document["found"]))
        if others := [run for run in without_folders(list(earlier)) if run["options"] not in asked]:
            document |= {"not_asked": others}
        document |= {"note": options.note} if options.note else {}
        (HERE / f"{document['name']}.json").write_text(text_of(document) + "\n")


if __name__ == "__main__":
    main()
