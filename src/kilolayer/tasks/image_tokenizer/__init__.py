"""Image tokenizers: an image as a grid of discrete codes, one for each patch, and back."""

from kilolayer.tasks.registry import Headline, Registration, register

register(
    Registration(
        name="image_tokenizer",
        summary="images become codes of a learned codebook, and codes images (convolutional encoder and decoder)",
        title="an image tokenizer",
        usage="evaluate {}",
        config="kilolayer.tasks.image_tokenizer.config:ImageTokenizerRunConfig",
        task="kilolayer.tasks.image_tokenizer.task:ImageTokenizerTask",
        run="kilolayer.tasks.image_tokenizer.trained_tokenizer:TrainedImageTokenizer",
        report="kilolayer.tasks.image_tokenizer.report:ImageTokenizerReport",
        headline=Headline("psnr", "PSNR, dB", 2),
        unit="image",
    )
)
