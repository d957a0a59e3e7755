"""Whether the result of admin-table3 is that of its steps, of its rate, or of our kernels: Admin at 6L-6L and 60L-12L again.

PYTHONPATH=src python benchmarks/reproduce/admin_checks.py OUT [--parallel 5] [--seconds 600] [--earlier FILE]

Seed 1 as in admin-table3, but for twice the steps, and at twice the rate. Beside them, 60L-12L in fp32 in a copy of the package
without `speed/`: no kernel of ours, nothing compiled and nothing recorded. It ends with the others, so it is not finished.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import kilolayer
from kilolayer.compare.grid import apply_setting
from kilolayer.config import dump
from kilolayer.files.writing import write
from kilolayer.report.metric_rows import read_rows
from kilolayer.reproduce.admin_table3 import ADMIN, training
from kilolayer.reproduce.lab import Lab

sys.path.insert(0, str(Path(__file__).parent.parent))

from reproduce.keep import text_of, without_folders
from run_pool import Pool, add_options, versions


class PlainRun:
    """60L-12L in fp32, trained by the modules alone in a process of its own."""

    def __init__(self, lab: Lab) -> None:
        where = (lab.folder.parent / "plain").resolve()
        self.folder = where / "run"
        package = Path(kilolayer.__file__).parent
        shutil.copytree(package, where / "kilolayer", ignore=shutil.ignore_patterns("speed", "__pycache__"))
        base = lab.translation("fra", into_english=False, train={**training(lab), "precision": "fp32"})
        setting = {"model.recipe": ADMIN, "layers": "2-1" if lab.tiny else "60-12", "train.seed": 1}
        write(where / "config.toml", dump(apply_setting(base, setting)))
        command = [sys.executable, "-m", "kilolayer", "train", str(where / "config.toml"), "--run", str(self.folder)]
        path = os.pathsep.join(filter(None, (str(where), os.environ.get("PYTHONPATH"))))
        with (where / "log.txt").open("w") as log:
            self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log)

    def stop(self) -> list[tuple[int, float]]:
        """End the run; the validation losses so far, by step."""
        self.process.terminate()
        self.process.wait()
        rows = read_rows(self.folder / "metrics.jsonl").rows
        return [(int(row["step"]), float(row["loss"])) for row in rows if row["kind"] == "valid"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    add_options(parser)
    options = parser.parse_args()
    pool = Pool(options.parallel, time.monotonic() + options.seconds, options.out)
    lab = pool.lab(options.out / "admin-checks", options.tiny, options.earlier)
    plain = PlainRun(lab)
    ours = training(lab)
    changes = {
        "longer": {
            "steps": 2 * ours["steps"],
            "warmup_steps": 2 * ours["warmup_steps"],
            "valid_every": 2 * ours["valid_every"],
        },
        "faster": {"lr": 2 * ours["lr"]},
    }
    axes = {"model.recipe": (ADMIN,), "layers": ("1-1", "2-1") if lab.tiny else ("6-6", "60-12"), "train.seed": (1,)}
    runs = {
        name: lab.compare(f"admin-{name}", lab.translation("fra", into_english=False, train=ours | change), axes)
        for name, change in changes.items()
    }
    about = {"command": "PYTHONPATH=src python benchmarks/reproduce/admin_checks.py OUT", "made_with": versions()}
    document = {**about, "changes": changes, "runs": runs, "plain": plain.stop()}
    write(options.out / "admin-checks.json", text_of(without_folders(json.loads(json.dumps(document)))) + "\n")
    pool.leave()


if __name__ == "__main__":
    main()
