"""Multi30k English-German, Post-LN and DeepNorm, 6L-6L and 18L-18L: tuned on val, then scored on test_2016_flickr.

    python benchmarks/translation/multi30k.py select OUT     # learning rates x warm-ups, validation loss only
    python benchmarks/translation/multi30k.py final OUT      # the best settings, three seeds, scored once on the test set

The runs of a stage form a comparison, runs/multi30k-STAGE. Writes multi30k-STAGE.json and the translations to OUT.
"""

from __future__ import annotations

from systems import Benchmark, System

RATES, WARMUPS = (4e-4, 8e-4, 1.6e-3, 3.2e-3), (1200, 4000)
SYSTEMS = {
    f"{recipe}-{layers}L": System({"model.recipe": recipe, "layers": layers}, RATES, WARMUPS)
    for layers in (18, 6)
    for recipe in ("deepnorm", "post_ln")
}
FINAL = {"train.average": 3, "data.test": "test_2016_flickr"}

if __name__ == "__main__":
    Benchmark("multi30k", "multi30k", SYSTEMS, FINAL).main("Multi30k, four systems.", steps=1500)
