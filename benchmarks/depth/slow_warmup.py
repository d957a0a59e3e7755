"""50 layers per side with a slow warm-up: 4,000 steps, of which the learning rate rises for 2,500.

PYTHONPATH=src python benchmarks/depth/slow_warmup.py OUT [--recipes deepnorm ...] [--layers 100]
    [--parallel 6] [--seconds 1500] [--earlier FILE]

The text, the model and all else are those of `kilolayer reproduce deepnet-table1`, whose 1,000 steps warm up for 400. Every
method trains at three rates that differ by factors of 2, and at more where the best is at the edge; the two best train with
two seeds. --layers: another depth, such as 100 for the best of them. Writes OUT/slow-warmup.json, or OUT/slow-warmup-100L.json;
needs KILOLAYER_DATA, with manythings.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from run_pool import study

METHODS = ("dlcl", "deepnorm", "pre_ln", "rezero", "r_fixup")
TRAIN = {"steps": 4000, "warmup_steps": 2500, "valid_every": 500}

if __name__ == "__main__":
    study(
        "slow-warmup",
        "PYTHONPATH=src python benchmarks/depth/slow_warmup.py OUT",
        settings=[{"model.recipe": method, "layers": 50} for method in METHODS],
        rates=(1e-3, 2e-3, 4e-3),
        seeds=(1, 2),
        config=lambda lab: lab.translation(train=TRAIN),
    )
