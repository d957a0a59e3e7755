"""Classification and regression: one or two sentences, an encoder with a head, a class or a number."""

from kilolayer.tasks.registry import Headline, Registration, Samples, Verb, register

register(
    Registration(
        name="classify",
        summary="a class or a number for one or two sentences (encoder with a head)",
        title="a classifier",
        usage="predict {} < sentences.tsv",
        config="kilolayer.tasks.classify.config:ClassifyConfig",
        task="kilolayer.tasks.classify.task:ClassifyTask",
        run="kilolayer.tasks.classify.classifier:Classifier",
        export="kilolayer.tasks.classify.export:ClassifierExport",
        verbs={"predict": Verb("label the sentences of each line with a classifier", "kilolayer.tasks.classify.predict")},
        headline=Headline("metric", "metric", 2),
        unit="example",
        samples=Samples(
            "Sample predictions",
            {"first": "sentence", "second": "second sentence", "label": "label", "prediction": "prediction"},
            "{first} {second}\n    {prediction} (label: {label})",
            compared=("label", "prediction"),
        ),
    )
)
