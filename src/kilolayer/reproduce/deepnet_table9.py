"""DeepNet, Table 9: language models after four solved examples."""

from __future__ import annotations

from kilolayer.report.table import Table
from kilolayer.reproduce.base import register
from kilolayer.reproduce.few_shots import FewShots


@register
class Table9(FewShots):
    """Four shots."""

    name = "deepnet-table9"
    claim = (
        "After four solved examples DeepNet (Sub-LN) answers more questions than GPT-2 at 24, 48 and 72 layers, and than "
        "NormFormer at 24 and 72; at 48 NormFormer is 0.2 points above it."
    )
    published = Table(
        ["accuracy", "Winogrande", "Winograd", "HellaSwag", "mean, with StoryCloze"],
        [
            ["GPT-2, 24 layers", "54.0", "67.7", "44.6", "59.0"],
            ["NormFormer, 24", "54.3", "70.2", "45.9", "60.5"],
            ["DeepNet, 24", "57.6", "74.7", "47.5", "63.2"],
            ["GPT-2, 48", "57.7", "71.2", "48.7", "62.9"],
            ["NormFormer, 48", "56.8", "75.4", "50.7", "64.7"],
            ["DeepNet, 48", "57.9", "71.9", "51.9", "64.5"],
            ["GPT-2, 72", "57.5", "73.3", "52.4", "64.8"],
            ["NormFormer, 72", "57.7", "74.0", "54.9", "65.9"],
            ["DeepNet, 72", "58.3", "74.0", "55.7", "66.8"],
        ],
    )
    shots = 4
    excepted = (("normformer", 1),)
    rule = FewShots.rule.replace(
        "above Pre-LN's and NormFormer's,", "above Pre-LN's and, but at the middle depth, NormFormer's,"
    )
