#!/bin/sh
# Puts the peers that a machine without a network lacks into a folder for its PYTHONPATH: pure Python, without dependencies that
# are there (torch, numpy, sympy, transformers). usage: [PYTHON=python with torch, setuptools and pip] peers.sh FOLDER
set -eu
into=${1:?folder}
python=${PYTHON:-python3}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"$python" -m pip install --quiet --no-deps --no-compile --target "$tmp/site" \
    torchscale==0.3.0 x-transformers==2.31.10 torch-einops-utils==0.2.0 einops==0.8.2 einx==0.4.3 loguru==0.7.3 timm==1.0.30
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest "$tmp" frozendict==2.4.7
# fairscale's archive cannot be built without CUDA; what TorchScale imports of it is Python. Its setup.py imports torch to tell
# its version, so the build environment is the one that has torch.
"$python" -m pip download --quiet --no-deps --no-binary=:all: --no-build-isolation --dest "$tmp" fairscale==0.4.0
tar -xzf "$tmp/fairscale-0.4.0.tar.gz" -C "$tmp"
mkdir -p "$into/timm/models"
cp -r "$tmp"/site/torchscale* "$tmp"/site/x_transformers* "$tmp"/site/torch_einops_utils "$tmp"/site/einops "$tmp"/site/einx \
    "$tmp"/site/loguru "$tmp"/fairscale-0.4.0/fairscale "$into"
"$python" -m zipfile -e "$tmp"/frozendict-*.whl "$into"
# TorchScale takes one function from timm, whose other parts need torchvision.
cp "$tmp/site/timm/layers/drop.py" "$into/timm/models/layers.py"
touch "$into/timm/__init__.py" "$into/timm/models/__init__.py"
du -sh "$into"
