"""Image classifiers."""

from __future__ import annotations

from tests.derivations.section import SHOWN, Data, Pieces, row, section

PEERS = {"timm compiled": "timm's ViT, compiled", "vit compiled": "Hugging Face's ViT, compiled", "vit": "Hugging Face's ViT"}
RATES = ("2.5e-4", "5e-4", "1e-3")


@section("An image classifier's step", "vision/speed.json", given=("no dropout, one H200", "torch 2.11"))
def steps(document: Data) -> Pieces:
    of_cifar = [each for each in document["rows"] if each["shape"]["size"] == 32]
    small, deep = shapes = sorted(of_cifar, key=lambda each: each["shape"]["layers"])
    for each in shapes:
        peers = {name: ms for name, ms in each["ms"].items() if name in PEERS}
        assert min(peers, key=peers.__getitem__) == "timm compiled"
        assert set(peers) == set(PEERS)
        assert not each["missing"]
    times = [each["ms"]["timm compiled"] / each["ms"]["kilolayer"] for each in shapes]
    yield f"{min(times):.1f} times as fast as timm's ViT, compiled"
    shape = small["shape"]
    assert {**shape, "layers": deep["shape"]["layers"]} == deep["shape"]
    yield f"{shape['rows']} images of {shape['size']} pixels in patches of {shape['patch']}, dim {shape['dim']}"
    yield row("", *(f"{each['shape']['layers']} layers" for each in shapes))
    for system, title in {"kilolayer": "Kilolayer", "kilolayer from pixels": "Kilolayer, with augmentation"}.items():
        yield row(title, *(f"{each['ms'][system]:.1f} ms" for each in shapes))
    for system, title in PEERS.items():
        yield row(
            title, *(f"{each['ms'][system]:.1f} ms ({each['ms'][system] / each['ms']['kilolayer']:.2f})" for each in shapes)
        )
    assert document["made_with"]["torch"].startswith("2.11")


@section(
    "the learning rate matters more than the recipe",
    "vision/parity.json",
    given=(
        "In ten epochs of CIFAR-10",
        "12 layers, dim 384, batches of 128 images",
        "keeps 2% of the",
        "The augmentation is that of `cifar10-12l`",
        "the 200 epochs of `cifar10-12l`",
    ),
)
def ten_epochs(document: Data) -> Pieces:
    runs = document["runs"]
    accuracy = {(each["system"], each["lr"]): each.get("accuracy") for each in runs.values() if each["augment"] == "full"}
    assert {each["epochs"] for each in runs.values()} == {10}
    assert {each["rows"] for each in runs.values()} == {128}
    yield row("", *RATES)
    for system in ("vit", "trainer:pre_ln", "trainer:sub_ln", "trainer:deepnorm"):
        found = [accuracy.get((system, lr)) for lr in RATES]
        title = "Hugging Face's ViT" if system == "vit" else SHOWN[system.partition(":")[2]]
        yield row(title, *("not run" if each is None else f"{each:.1f}" for each in found))
        assert max(each for each in found if each is not None) == found[0]
    yield "DeepNorm at 1e-3 is dead"
    assert accuracy["trainer:deepnorm", "1e-3"] == 10
    light = {each["system"]: each for each in runs.values() if each["augment"] == "light"}
    assert {each["lr"] for each in light.values()} == {"2.5e-4"}
    yield f"at {light['vit']['lr']} and in the same loop"
    yield f"has {light['vit']['accuracy']:.1f} and Sub-LN {light['sub_ln']['accuracy']:.1f}"
