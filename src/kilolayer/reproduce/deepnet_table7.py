"""DeepNet, Table 7: language models after zero solved examples."""

from __future__ import annotations

from kilolayer.report.table import Table
from kilolayer.reproduce.base import register
from kilolayer.reproduce.few_shots import FewShots


@register
class Table7(FewShots):
    """Zero shots."""

    name = "deepnet-table7"
    claim = (
        "After zero solved examples DeepNet (Sub-LN) answers more questions than GPT-2 and NormFormer at 24, 48 and 72 layers."
    )
    published = Table(
        ["accuracy", "Winogrande", "Winograd", "HellaSwag", "mean, with StoryCloze"],
        [
            ["GPT-2, 24 layers", "55.2", "65.3", "44.8", "59.0"],
            ["NormFormer, 24", "54.3", "68.1", "45.9", "60.1"],
            ["DeepNet, 24", "54.3", "71.9", "46.9", "61.4"],
            ["GPT-2, 48", "57.3", "67.0", "48.0", "61.6"],
            ["NormFormer, 48", "56.5", "70.5", "49.8", "62.7"],
            ["DeepNet, 48", "57.0", "73.3", "51.2", "64.1"],
            ["GPT-2, 72", "58.0", "70.9", "51.7", "64.1"],
            ["NormFormer, 72", "57.4", "75.4", "53.6", "65.4"],
            ["DeepNet, 72", "57.9", "73.7", "55.1", "65.8"],
        ],
    )
    shots = 0
