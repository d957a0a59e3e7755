"""The default model of a run on a CPU, where that of a GPU would not learn anything in a day."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kilolayer.config import Table, merge
from kilolayer.errors import KilolayerError
from kilolayer.tasks.config import RunConfig
from kilolayer.training.run import choose_device

WIDTHS = {"dim": 128, "heads": 4, "ffn_dim": 256}
LAYERS = 6
NOTE = (
    f"[model] gives no widths, and this machine trains on a CPU: dim is {WIDTHS['dim']}, heads {WIDTHS['heads']} and ffn_dim "
    f"{WIDTHS['ffn_dim']}, with {LAYERS} layers in each stack if no depth is given either; on a GPU the defaults are larger"
)


def cpu_model(given: Mapping[str, Any]) -> Table:
    """The defaults of [model] for the tables of a run; empty if they or their task set a width, or if it trains on a GPU."""
    train = given.get("train")
    device = train.get("device", "auto") if isinstance(train, Mapping) else "auto"
    try:
        model = merge(RunConfig.choose(given).defaults(given), given).get("model", {})
    except KilolayerError:
        return {}  # the caller that builds the configuration reports what is wrong, and where
    if not isinstance(model, Mapping) or {*WIDTHS, "kv_heads"} & set(model) or device not in ("auto", "cpu"):
        return {}
    if choose_device(device).type != "cpu":
        return {}
    has_depth = {"layers", "encoder_layers", "decoder_layers"} & set(model)
    return {"model": {**WIDTHS, **({} if has_depth else {"layers": LAYERS})}}
