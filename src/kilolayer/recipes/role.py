"""The roles of projections: what a matrix does in its sublayer, by which recipes treat it."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a projection does in its sublayer; gains are given by role, never by parameter name."""

    QUERY_KEY = "query_key"
    VALUE = "value"
    ATTENTION_OUTPUT = "attention_output"
    FFN_IN = "ffn_in"
    FFN_OUT = "ffn_out"
    ROUTER = "router"
    HEAD = "head"


# The projections that DeepNorm, Sub-LN and T-Fixup scale: all except query and key, which only determine where attention looks.
VALUE_PATH = (Role.VALUE, Role.ATTENTION_OUTPUT, Role.FFN_IN, Role.FFN_OUT)
EVERY_MATRIX = (Role.QUERY_KEY, *VALUE_PATH)
