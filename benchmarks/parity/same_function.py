"""R-Fixup with the weights of its authors' layers: the largest differences of logits and gradients, in fp64.

python benchmarks/parity/same_function.py OUT.json

Needs the folder `fairseq` of github.com/hongyi-zhang/Fixup on the PYTHONPATH. The authors' softmax is in fp32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from models import AuthorsFixup, Kilolayer, Size, System
from torch import Tensor, nn

from kilolayer.layers.position import sinusoids

SIZE = Size(layers=3, vocabulary=50, dim=16, heads=2, ffn_dim=32, dropout=0.0)


class OurSinusoids(nn.Module):
    """The positions of Kilolayer, whose frequencies differ a little from fairseq's."""

    def forward(self, ids: Tensor) -> Tensor:
        return sinusoids(torch.arange(ids.shape[1])[None], SIZE.dim, torch.float64)


def pairs(theirs: Any) -> dict[str, Tensor]:
    """Their weights under our names. They subtract shifts, and we add them."""
    found = {
        "embedding.weight": theirs.table.weight,
        "encoder.top_shift.bias": -theirs.encoder_top[0].bias,
        "encoder.top_scale.weight": theirs.encoder_top[1].weight,
        "decoder.top_shift.bias": -theirs.decoder_top.bias,
    }
    for side, layers in (("encoder", theirs.encoder), ("decoder", theirs.decoder)):
        for index, layer in enumerate(layers):
            shifts = [getattr(layer, f"shift{number}").bias for number in range(4 + (side == "decoder"))]
            kinds = {"self_attention": layer.self_attn} | ({"cross_attention": layer.encoder_attn} if side == "decoder" else {})
            for number, (kind, attention) in enumerate(kinds.items()):
                name, weight, dim = f"{side}.blocks.{index}.{kind}", attention.in_proj_weight, attention.embed_dim
                split = {"query": weight[:dim], "key_value": weight[dim:]}
                own = {"query_key_value": weight} if kind == "self_attention" else split
                found |= {f"{name}.f.{each}.weight": value for each, value in own.items()}
                found[f"{name}.f.output.weight"] = attention.out_proj.weight
                found[f"{name}.f.input_shift.bias"] = -shifts[number]
                found[f"{name}.branch.weight"] = getattr(layer, f"scale{number}").weight
            name = f"{side}.blocks.{index}.feedforward"
            for each, shift in zip(("input_shift", "activation_shift", "output_shift"), shifts[len(kinds) :], strict=True):
                found[f"{name}.f.{each}.bias"] = -shift
            found |= {f"{name}.f.input.weight": layer.fc1.weight, f"{name}.f.output.weight": layer.fc2.weight}
            found[f"{name}.branch.weight"] = getattr(layer, f"scale{len(kinds)}").weight
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    theirs: Any = AuthorsFixup(System("fixup", "r_fixup"), SIZE)
    ours = Kilolayer(System("kilolayer", "r_fixup"), SIZE).model.double()
    theirs.positions = OurSinusoids()
    for weight in theirs.parameters():
        weight.data.normal_(0, 0.2)
    own = dict(ours.named_parameters())
    given = pairs(theirs)
    assert own.keys() == given.keys()
    for name, weight in given.items():
        own[name].data.copy_(weight.reshape(own[name].shape))
    source, target = torch.randint(4, 50, (3, 7)), torch.randint(4, 50, (3, 5))
    source[0, -2:] = 0
    logits = {"theirs": theirs(source, target), "ours": ours(source, target).logits}
    difference = logits["theirs"].detach() - logits["ours"].detach()
    found = {"logits": [float(difference.abs().max()), float(logits["ours"].detach().abs().max())]}
    gradients = torch.autograd.grad(logits["theirs"].square().sum(), list(theirs.parameters()))
    by_weight = dict(zip(map(id, theirs.parameters()), gradients, strict=True))
    logits["ours"].square().sum().backward()
    table, fc1 = "embedding.weight", "encoder.blocks.0.feedforward.f.input.weight"
    for name, weight in ((table, theirs.table.weight), (fc1, theirs.encoder[0].fc1.weight)):
        gradient = own[name].grad
        assert gradient is not None
        found[f"gradient of {name}"] = [float((by_weight[id(weight)] - gradient).abs().max()), float(gradient.abs().max())]
    about = {"command": "python benchmarks/parity/same_function.py OUT.json", "torch": torch.__version__}
    text = json.dumps({**about, "largest difference, largest value": found}, indent=1)
    options.out.write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
