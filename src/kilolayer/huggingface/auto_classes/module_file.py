"""The module that is saved next to a model, and that Transformers loads with `trust_remote_code=True`.

It holds the classes of this folder and all of Kilolayer that they use, so that it needs only torch and Transformers.
"""

from __future__ import annotations

from pathlib import Path

from kilolayer.files.writing import write
from kilolayer.huggingface.auto_classes.one_file import Home, one_file
from kilolayer.layers.norms.base import norm_class
from kilolayer.layers.norms.layer import LayerNorm
from kilolayer.layers.norms.registry import find_norm
from kilolayer.layers.norms.rms import RMSNorm
from kilolayer.recipes.base import Recipe, is_built_in
from kilolayer.recipes.registry import DEFAULT, find, register
from kilolayer.version import VERSION

CLASSES = {
    "configuration": ("KilolayerConfig",),
    "states": ("KilolayerModel",),
    "language_model": ("KilolayerForCausalLM",),
    "translator": ("KilolayerForSeq2SeqLM",),
    "encoders": ("KilolayerForMaskedLM", "KilolayerForSequenceClassification"),
}
"""The classes that the module is for, by the file of this folder that defines them."""
HERE = __name__.rpartition(".")[0]
STAND_INS = {__name__: f"{HERE}.copied_module"}


def write_module(folder: Path, name: str, recipe: type[Recipe], norm: str) -> None:
    """Write the module for models of a recipe and a norm to a folder."""
    write(folder / name, module_source(recipe, norm).encode())


def module_source(recipe: type[Recipe], norm: str = LayerNorm.name) -> str:
    """The source of the module. It includes the classes of the recipe and of the norm, even if they are a user's."""
    roots = [Home(f"{HERE}.{file}", name) for file, names in CLASSES.items() for name in names]
    roots += [Home(register.__module__, name) for name in ("register", "_registry")]
    # The default recipe is that of an empty configuration, which Transformers compares others with.
    roots += [Home(kind.__module__, kind.__qualname__) for kind in dict.fromkeys((recipe, find(DEFAULT)))]
    norms = [norm_class(name) for name in dict.fromkeys((LayerNorm.name, RMSNorm.name, norm))]
    roots += [Home(find_norm.__module__, "_norms"), *(Home(kind.__module__, kind.__qualname__) for kind in norms)]
    named = "" if is_built_in(recipe) else f"\n\n_registry[{recipe.table_name()!r}] = register({recipe.__name__})\n"
    named += f"\n\n_norms[{norm!r}] = {norms[-1].__name__}\n" if ":" in norm else ""
    head = f"Classes for models of the recipe {recipe.title}, written by Kilolayer {VERSION} from its own files (MIT license)."
    return f'"""{head}"""\n\n{one_file(roots, STAND_INS)}{named}'
