"""Which initial weights single stacks learn best from: Pre-LN and Post-LN under each of them, at their best rates.

PYTHONPATH=src python benchmarks/init/run.py OUT [--parallel 6] [--seconds 600] [--earlier benchmarks/init/init.json]

Causal language models of the books, 12 layers of dim 256. Writes OUT/init.json; needs KILOLAYER_DATA.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from run_pool import study

INITS = ("xavier", "torch", "fairseq", "bert")

if __name__ == "__main__":
    study(
        "init",
        "PYTHONPATH=src python benchmarks/init/run.py OUT",
        settings=[
            {"model.recipe": {"name": recipe, "init": init}, "layers": 12} for recipe in ("pre_ln", "post_ln") for init in INITS
        ],
        rates=(1e-3, 2e-3, 4e-3),
        seeds=(1, 2, 3),
        config=lambda lab: lab.language(model={"dim": 256, "heads": 4, "ffn_dim": 1024}),
    )
