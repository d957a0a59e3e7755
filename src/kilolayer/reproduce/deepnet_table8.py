"""DeepNet, Table 8: language models after one solved example."""

from __future__ import annotations

from kilolayer.report.table import Table
from kilolayer.reproduce.base import register
from kilolayer.reproduce.few_shots import FewShots


@register
class Table8(FewShots):
    """One shot."""

    name = "deepnet-table8"
    claim = (
        "After one solved example DeepNet (Sub-LN) answers more questions than GPT-2 and NormFormer at 24, 48 and 72 layers."
    )
    published = Table(
        ["accuracy", "Winogrande", "Winograd", "HellaSwag", "mean, with StoryCloze"],
        [
            ["GPT-2, 24 layers", "54.4", "66.7", "44.8", "59.2"],
            ["NormFormer, 24", "54.0", "67.4", "45.6", "59.8"],
            ["DeepNet, 24", "54.1", "70.2", "47.3", "61.1"],
            ["GPT-2, 48", "56.0", "69.5", "48.5", "62.1"],
            ["NormFormer, 48", "54.7", "71.2", "50.6", "62.8"],
            ["DeepNet, 48", "56.8", "71.6", "51.5", "63.7"],
            ["GPT-2, 72", "56.9", "71.2", "52.2", "64.1"],
            ["NormFormer, 72", "57.8", "69.8", "54.0", "64.6"],
            ["DeepNet, 72", "59.8", "74.0", "55.5", "66.8"],
        ],
    )
    shots = 1
