"""Writes docs/recipes.md from the registry of recipes.

python docs/make_recipes.py
"""

from __future__ import annotations

import dataclasses
import textwrap
import typing
from pathlib import Path

from kilolayer import recipes
from kilolayer.config import choices_of, help_texts

HEAD = """# Recipes

Made by `python docs/make_recipes.py`. N and M are the layers of encoder and decoder; f is a sublayer. Xavier's standard
deviation is sqrt(2 / (fan_in + fan_out)), for each projection on its own. Biases start at 0. A configured recipe is
`kl.recipes.get("admin", weight="trainable")`, in TOML `[model.recipe]`; `kilolayer recipes NAME` prints the constants by depth.

A recipe may also multiply the learning rate, Adam's eps and the weight decay by what a weight is (a matrix by its role, a
norm, a bias, a table) and by the model's width and depth. Its section says so; `kilolayer plan` prints the factors.
`train.lr`, `train.eps` and `train.weight_decay` are what is multiplied, and `train.layer_decay` multiplies on top.

| name | equation | paper |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    found = [recipes.find(name) for name in recipes.names()]
    table = "".join(
        f"| [{each.name}](#{each.name}) | `{each.equation.replace('|', chr(92) + '|')}` | {each.paper} |\n" for each in found
    )
    return HEAD + table + "".join(section(each.name) for each in found)


def section(name: str) -> str:
    """One recipe: what it is, what to expect, its options and what it extends."""
    recipe = recipes.get(name)
    texts = help_texts(type(recipe))
    lines = [
        f"\n## {name}\n",
        f"**{recipe.title}.** {recipe.__doc__}\n",
        f"    {recipe.equation}\n",
        f"{wrapped(recipe.expect)}\n",
    ]
    lines += [f"{wrapped(text)}\n" for text in (recipe.extension, recipe.training) if text]
    hints = typing.get_type_hints(type(recipe))
    for field in dataclasses.fields(recipe):
        default = getattr(recipe, field.name)
        others = "".join(f", `{choice!r}`" for choice in choices_of(hints[field.name]) if choice != default)
        lines.append(wrapped(f"- `{field.name}={default!r}`{others}: {texts[field.name]}", indent="  "))
    return "\n".join(lines).rstrip() + "\n"


def wrapped(text: str, indent: str = "") -> str:
    """Text in lines as long as those of the other pages."""
    return textwrap.fill(text, 130, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    (Path(__file__).parent / "recipes.md").write_text(page())
