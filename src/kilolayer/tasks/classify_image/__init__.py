"""Classification of images: an encoder of patches with a head, a class for each image."""

from kilolayer.tasks.registry import Headline, Registration, Samples, Verb, register

register(
    Registration(
        name="classify_image",
        summary="a class for each image (encoder of patches with a head)",
        title="an image classifier",
        usage="classify {} IMAGES...",
        config="kilolayer.tasks.classify_image.config:ClassifyImageConfig",
        task="kilolayer.tasks.classify_image.task:ClassifyImageTask",
        run="kilolayer.tasks.classify_image.image_classifier:ImageClassifier",
        report="kilolayer.tasks.classify_image.report:ImageClassifierReport",
        evaluation="kilolayer.tasks.classify_image.evaluate",
        export="kilolayer.tasks.classify_image.export:ImageClassifierExport",
        verbs={
            "classify": Verb(
                "label images with an image classifier, or their pixels with a segmentation model",
                "kilolayer.cli.classify",
                "kilolayer.tasks.classify_image.classify",
            )
        },
        headline=Headline("accuracy", "top-1 accuracy", 2),
        unit="image",
        samples=Samples(
            "Sample predictions",
            {"image": "image", "label": "class", "prediction": "prediction"},
            "{name}: {prediction} (class: {label})",
        ),
    )
)
