"""lm-eval with Kilolayer runs among its models.

    python -m kilolayer.cli.harness run --model kilolayer --model_args run=runs/mine --tasks hellaswag --num_fewshot 4

accepts the same arguments as lm_eval. In Python, `RunModel("runs/mine")` is a model for `lm_eval.simple_evaluate`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kilolayer.evaluate.harness import HarnessModel, registered
from kilolayer.models.decoder import Decoder
from kilolayer.runs.load import load
from kilolayer.runs.run import Precision


@registered("kilolayer")
class RunModel(HarnessModel):
    """The trained language model of a run folder.

    batch_size and max_batch_size, which lm-eval passes to all models, have no effect: batches are made by number of tokens.
    """

    def __init__(
        self,
        run: str | Path,
        device: str | None = None,
        precision: Precision = "fp32",
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        opened: Any = load(run, device=device or "auto", precision=precision)
        length = opened.context  # raises if the run is no language model
        assert isinstance(opened.reader, Decoder)
        super().__init__(opened.reader, opened.tokenizer, length)


def main() -> None:
    """Run lm-eval's command line."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()


if __name__ == "__main__":
    main()
