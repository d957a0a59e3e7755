"""Segmentation of images: an encoder of patches with a map head, a class for each pixel."""

from kilolayer.tasks.registry import Headline, Registration, Verb, register

register(
    Registration(
        name="segment",
        summary="a class for each pixel of an image (encoder of patches with a map head)",
        title="a segmentation model",
        usage="classify {} IMAGES...",
        config="kilolayer.tasks.segment.config:SegmentConfig",
        task="kilolayer.tasks.segment.task:SegmentTask",
        run="kilolayer.tasks.segment.segmenter:Segmenter",
        report="kilolayer.tasks.segment.report:SegmentReport",
        evaluation="kilolayer.tasks.segment.evaluate",
        verbs={
            "classify": Verb(
                "label images with an image classifier, or their pixels with a segmentation model",
                "kilolayer.cli.classify",
                "kilolayer.tasks.segment.classify",
            )
        },
        headline=Headline("mean_iou", "mean IoU", 2),
        unit="pixel",
    )
)
