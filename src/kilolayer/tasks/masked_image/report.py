"""What a masked image model adds to the report: images, masks and reconstructions, and the score beside the loss by step."""

from __future__ import annotations

from kilolayer.report.panel import chart_panel, series_of
from kilolayer.report.picture import picture_panel
from kilolayer.report.record import Record
from kilolayer.report.task_report import Section, TaskReport
from kilolayer.tasks.masked_image.targets import CodeTarget, PixelTarget
from kilolayer.tasks.masked_image.task import PICTURE


class MaskedImageReport(TaskReport):
    """Images above what the model reads of them and how it fills them, and accuracy or squared error by step."""

    def sections(self, record: Record, prefix: str) -> list[Section]:
        title = "Images, what the model reads of them, and how it fills them"
        panels = [picture_panel(record.scores.get(PICTURE), title, title)]
        for target in (CodeTarget, PixelTarget):
            if any(target.key in row for row in record.valid):
                series = [series_of("validation", record.valid, target.key)]
                panel = chart_panel(
                    f"{prefix}masked-{target.key}",
                    f"{target.title[0].upper()}{target.title[1:]}",
                    series,
                    x_label="step",
                    y_label=target.title,
                    description=f"The {target.title} of the validation images, by step",
                    from_zero=True,
                )
                panels.append(panel)
        shown = [panel for panel in panels if panel is not None]
        return [Section("Masked patches", panels=shown)] if shown else []
