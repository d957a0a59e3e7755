"""Fine-tuning: one or two sentences, an encoder with a head, a class or a number."""

from kilolayer.tasks.registry import Headline, Registration, Samples, Verb, register

register(
    Registration(
        name="classify",
        summary="the class of one or two sentences, or a number, by an encoder with a head",
        title="a classifier",
        usage="predict {} < sentences.tsv",
        config="kilolayer.tasks.classify.config:ClassifyConfig",
        task="kilolayer.tasks.classify.task:ClassifyTask",
        run="kilolayer.runs.classifier:Classifier",
        verbs={"predict": Verb("a classifier labels the sentences of each line", "kilolayer.cli.predict")},
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
