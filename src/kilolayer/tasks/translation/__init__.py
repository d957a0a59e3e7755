"""Translation: text in two languages, an encoder-decoder, the loss a token, BLEU."""

from kilolayer.tasks.registry import Headline, Registration, Samples, Verb, register

register(
    Registration(
        name="translation",
        summary="translation between languages, by an encoder-decoder",
        title="a translator",
        usage="translate {} < text",
        config="kilolayer.tasks.translation.config:TranslationConfig",
        task="kilolayer.tasks.translation.task:TranslationTask",
        run="kilolayer.runs.translator:Translator",
        verbs={"translate": Verb("lines in, lines out, in order", "kilolayer.cli.translate")},
        evaluation="kilolayer.cli.evaluate_translation",
        headline=Headline("bleu", "BLEU", 1),
        samples=Samples(
            "Sample translations",
            {"source": "source", "reference": "reference", "hypothesis": "hypothesis"},
            "{source}\n    {hypothesis}\n    {reference} (reference)",
        ),
    )
)
