"""One process imports what commands and process groups need; the processes of all tests are forked from it."""

from __future__ import annotations

import multiprocessing

MODULES = [
    *(f"kilolayer.cli.{verb}" for verb in ("evaluate", "report", "train", "translate")),
    *(f"kilolayer.tasks.{task}.task" for task in ("causal_lm", "classify", "masked_lm", "translation")),
    "kilolayer.evaluate.scores",
    "kilolayer.models.build",
    "kilolayer.moe.full_state",
    "kilolayer.report.page",
    "kilolayer.runs.begin",
    "kilolayer.training.train",
    "kilolayer.training.loop",
    "matplotlib.backends.backend_svg",
    "pytest",
    "torch._dynamo",  # torch itself imports it at the first step
    "torch.distributed",
    # What Python imports late: another user may not be allowed to read it.
    *(f"multiprocessing.{name}" for name in ("dummy", "queues", "synchronize")),
    "encodings.unicode_escape",
    "encodings.latin_1",
]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(MODULES)
