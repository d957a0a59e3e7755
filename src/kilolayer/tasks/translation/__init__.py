"""Translation: text in two languages, an encoder-decoder, the loss per token, BLEU."""

from kilolayer.tasks.registry import Headline, Registration, Samples, Verb, register

register(
    Registration(
        name="translation",
        summary="translation between languages (encoder-decoder)",
        title="a translator",
        usage='translate {} <<< "a sentence"',
        config="kilolayer.tasks.translation.config:TranslationConfig",
        task="kilolayer.tasks.translation.task:TranslationTask",
        run="kilolayer.tasks.translation.translator:Translator",
        report="kilolayer.tasks.translation.report:TranslatorReport",
        export="kilolayer.tasks.translation.export:TranslatorExport",
        verbs={"translate": Verb("translate the lines of standard input, in order", "kilolayer.tasks.translation.translate")},
        evaluation="kilolayer.tasks.translation.evaluate",
        headline=Headline("bleu", "BLEU", 1),
        samples=Samples(
            "Sample translations",
            {"source": "source", "reference": "reference", "hypothesis": "hypothesis"},
            "{source}\n    {hypothesis}\n    {reference} (reference)",
            compared=("reference", "hypothesis"),
        ),
    )
)
