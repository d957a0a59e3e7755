"""Masked images: an encoder of patches predicts what hidden patches show, as codes of a tokenizer or as pixels."""

from kilolayer.tasks.registry import Headline, Registration, register

register(
    Registration(
        name="masked_image",
        summary="hidden patches of images, as codes of a tokenizer or as pixels (encoder of patches)",
        title="a masked image model",
        usage="evaluate {}",
        config="kilolayer.tasks.masked_image.config:MaskedImageConfig",
        task="kilolayer.tasks.masked_image.task:MaskedImageTask",
        run="kilolayer.tasks.masked_image.masked_image_model:MaskedImageModel",
        report="kilolayer.tasks.masked_image.report:MaskedImageReport",
        export="kilolayer.tasks.masked_image.export:MaskedImageExport",
        headline=Headline("loss", "loss of masked patches", 4, larger_is_better=False),
        unit="masked patch",
    )
)
