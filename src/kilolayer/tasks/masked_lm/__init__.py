"""Masked language modelling: running text, an encoder, the loss and accuracy of masked tokens."""

from kilolayer.tasks.registry import Headline, Registration, Samples, Verb, register

register(
    Registration(
        name="masked_lm",
        summary="a masked language model of running text (encoder)",
        title="a masked language model",
        usage='fill {} "a <mask> text"',
        config="kilolayer.tasks.masked_lm.config:MaskedLMConfig",
        task="kilolayer.tasks.masked_lm.task:MaskedLMTask",
        run="kilolayer.tasks.masked_lm.masked_language_model:MaskedLanguageModel",
        export="kilolayer.tasks.masked_lm.export:MaskedLanguageModelExport",
        verbs={"fill": Verb("fill the masks in a text with a masked language model", "kilolayer.tasks.masked_lm.fill")},
        headline=Headline("accuracy", "accuracy of masked tokens, %", 2),
        unit="masked token",
        samples=Samples(
            "Sample texts",
            {"masked": "what the model reads", "text": "the text", "filled": "what the model fills in"},
            "{masked}\n-> {filled}\n",
            compared=("text", "filled"),
        ),
    )
)
