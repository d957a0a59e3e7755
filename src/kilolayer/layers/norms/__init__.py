"""Norms over the last axis: one file per norm. Each registers its class; `model.norm` names it, or a class of your own."""
