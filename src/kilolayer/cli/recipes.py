"""kilolayer recipes: list all recipes, or show one recipe's equation, constants, source and expected behaviour."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any

from kilolayer import recipes
from kilolayer.cli.configuration import int_between
from kilolayer.cli.output import show_json, show_line, show_table
from kilolayer.config import Table, choices_of, help_texts, overrides
from kilolayer.errors import OptionError
from kilolayer.recipes.base import DEEPEST, Depths, Description, Recipe

PAIRS = ((6, 6), (18, 18), (50, 50), (100, 100), (500, 500), (60, 12))
SINGLES = (12, 24, 100, 1000)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a recipe; set its options with --model.recipe.NAME VALUE")
    parser.add_argument("--encoder-layers", type=int_between(0, DEEPEST), metavar="N", help="depth of the encoder")
    parser.add_argument("--decoder-layers", type=int_between(0, DEEPEST), metavar="M", help="depth of the decoder")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Print the list or one recipe."""
    typed_options = _typed_options(typed)
    if options.name is None:
        if typed or options.encoder_layers is not None or options.decoder_layers is not None:
            raise OptionError("an option is given without a recipe", fix="name the recipe first: kilolayer recipes NAME")
        _list(options.json)
        return 0
    recipe = recipes.get(options.name, **typed_options)
    if options.encoder_layers is None and options.decoder_layers is None:
        depths = [Depths(*pair) for pair in PAIRS] + [Depths(encoder=layers) for layers in SINGLES]
        depths += [Depths(decoder=layers) for layers in SINGLES]
    else:
        depths = [Depths(options.encoder_layers or 0, options.decoder_layers or 0)]
    described = [_describe(recipe, each) for each in depths if len(depths) == 1 or _applies(recipe, each)]
    if options.json:
        show_json(_as_json(recipe, described))
    else:
        _show(recipe, described)
    return 0


def _typed_options(typed: list[str]) -> Table:
    """The recipe's options from the command line, in the same form as for `plan` and `train`."""
    match overrides(typed) or {"model": {"recipe": {}}}:
        case {"model": {"recipe": dict(table), **others}, **tables} if not others and not tables:
            return table
        case _:
            pass
    fix = "set options of the recipe with --model.recipe.NAME VALUE"
    raise OptionError(f"unexpected option {typed[0].partition('=')[0]!r}", where="on the command line", fix=fix)


def _list(as_json: bool) -> None:
    found = [recipes.find(name) for name in recipes.names()]
    if as_json:
        show_json([{"name": each.name, "title": each.title, "equation": each.equation, "paper": each.paper} for each in found])
        return
    for each in found:
        show_line(f"{each.name}\n    {each.equation}\n    {each.paper}")
    show_line("\nOne of them in full: kilolayer recipes NAME. Which one to take: docs/which-recipe.md")


def _applies(recipe: Recipe, depths: Depths) -> bool:
    try:
        recipe.check_depths(depths)
    except ValueError:
        return False
    return True


def _describe(recipe: Recipe, depths: Depths) -> Description:
    return recipe.describe(encoder_layers=depths.encoder, decoder_layers=depths.decoder)


def _show(recipe: Recipe, described: list[Description]) -> None:
    show_line(f"{recipe.title}\n\n    {recipe.equation}\n")
    for name, text in (("paper", recipe.paper), ("expect", recipe.expect)):
        if text:
            show_line(f"{name}: {text}")
    for note in described[0].notes:
        show_line(f"note: {note}")
    texts = help_texts(type(recipe))
    hints = typing.get_type_hints(type(recipe))
    for field in dataclasses.fields(recipe):
        allowed = f" ({', '.join(choices)})" if (choices := choices_of(hints[field.name])) else ""
        show_line(f"option: --model.recipe.{field.name} {texts.get(field.name, '')}{allowed} [{getattr(recipe, field.name)}]")
    show_line()
    names = list(dict.fromkeys(name for each in described for side in each.depths.sides for name in getattr(each, side)))
    rows = [
        [each.depths.title, side, *(f"{getattr(each, side)[name]:.4f}" for name in names)]
        for each in described
        for side in each.depths.sides
        if names
    ]
    if rows:
        show_table("Constants", rows, header=["depth", "stack", *names])
    else:
        show_line("No constants: its numbers do not depend on the depth, or come from data.")


def _as_json(recipe: Recipe, described: list[Description]) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "title": recipe.title,
        "options": recipe.options(),
        "equation": recipe.equation,
        "paper": recipe.paper,
        "expect": recipe.expect,
        "notes": list(described[0].notes),
        "constants": [
            {
                "encoder_layers": each.depths.encoder,
                "decoder_layers": each.depths.decoder,
                "encoder": each.encoder,
                "decoder": each.decoder,
            }
            for each in described
        ],
    }
