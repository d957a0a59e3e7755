"""Language modelling: running text, a decoder, the loss per token, bits per byte."""

from kilolayer.tasks.registry import Headline, Registration, Samples, Verb, register

register(
    Registration(
        name="causal_lm",
        summary="a language model of running text (decoder)",
        title="a language model",
        usage='generate {} --prompt "..."',
        config="kilolayer.tasks.causal_lm.config:CausalLMConfig",
        task="kilolayer.tasks.causal_lm.task:CausalLMTask",
        run="kilolayer.tasks.causal_lm.language_model:LanguageModel",
        export="kilolayer.tasks.causal_lm.export:LanguageModelExport",
        verbs={"generate": Verb("continue prompts with a language model", "kilolayer.tasks.causal_lm.generate")},
        evaluation="kilolayer.tasks.causal_lm.evaluate",
        headline=Headline("bits_per_byte", "bits per byte", 4, larger_is_better=False),
        samples=Samples(
            "Sample continuations",
            {"prompt": "prompt", "text": "how the text continues", "continuation": "how the model continues"},
            "{prompt}[{continuation}]\n",
        ),
    )
)
