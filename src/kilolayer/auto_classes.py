"""The former name of `kilolayer.huggingface.auto_classes`, kept for one release."""

from __future__ import annotations

import warnings

from kilolayer.huggingface.auto_classes import *  # noqa: F403

warnings.warn("kilolayer.auto_classes is now kilolayer.huggingface.auto_classes", DeprecationWarning, stacklevel=2)
