"""Compare our decoding speed on two CPU cores with CTranslate2's, on the same folded weights.

    pip install ctranslate2
    python benchmarks/decoding/beside_ctranslate2.py benchmarks/decoding/ctranslate2.json
    python benchmarks/decoding/beside_ctranslate2.py benchmarks/decoding/ctranslate2_int8.json --int8 --rounds 3

A DeepNorm translation model with random weights is folded into a plain Post-LN model, and CTranslate2 is given its weights
through the specification of its converters. The output table is built so that no hypothesis ends: every output has 30 tokens,
and both systems do the same work. Each system runs in a separate process, because two OpenMP runtimes in one process interfere.
Rounds alternate; a round in which other processes used more than a tenth of a core is repeated, up to a limit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.search import generate
from kilolayer.layers.position import sinusoids
from kilolayer.speed.runtime import FAST

PAD, BOS, EOS = 0, 2, 3
WORDS = {PAD: "<blank>", 1: "<unk>", BOS: "<s>", EOS: "</s>"}
SHAPES = {
    "6L-6L, d 256": {"vocab_size": 8000, "dim": 256, "heads": 4, "ffn_dim": 1024, "layers": 6},
    "18L-18L, d 512": {"vocab_size": 32_000, "dim": 512, "heads": 8, "ffn_dim": 2048, "layers": 18},
}
LENGTH = 30  # tokens per output
SYSTEMS = ("ours", "ours through modules", "ctranslate2", "ctranslate2 int8")
INT8_SYSTEMS = ("ours", "ours int8", "ctranslate2", "ctranslate2 int8")


def plain_translator(shape: dict[str, int]) -> kl.EncoderDecoder:
    """A folded DeepNorm model whose output depends on its input and never ends."""
    torch.manual_seed(0)
    layers = shape["layers"]
    model = kl.EncoderDecoder(
        shape["vocab_size"], shape["dim"], shape["heads"], shape["ffn_dim"], layers, layers, "deepnorm", tie_embeddings=False
    ).eval()
    assert model.vocabulary is not None
    with torch.no_grad():
        for sublayer in model.decoder.sublayers():
            for parameter in sublayer.f.parameters():
                parameter.mul_(3)
        # One direction of the last state is always large; only padding, start and end have a weight on it, and a negative one.
        last = model.decoder.sublayers()[-1].out_norm
        assert isinstance(last, nn.LayerNorm)
        last.bias[0] = 30.0
        model.vocabulary.weight.mul_(2)
        model.vocabulary.weight[:, 0] = 0.0
        model.vocabulary.weight[[PAD, BOS, EOS]] = -10.0 * torch.eye(1, shape["dim"])
    plain = kl.fold(model)
    assert isinstance(plain, kl.EncoderDecoder)
    return plain


def sources(batch: int, vocab_size: int) -> Tensor:
    """Int64 [batch, 31]: 15 to 30 random tokens and the end token, padded on the right."""
    generator = torch.Generator().manual_seed(0)
    lengths = [30, *torch.randint(15, 31, (batch - 1,), generator=generator).tolist()]
    rows = [[*torch.randint(4, vocab_size, (length,), generator=generator).tolist(), EOS] for length in lengths]
    return torch.tensor([row + [PAD] * (31 - len(row)) for row in rows])


def save_as_ctranslate2(plain: kl.EncoderDecoder, folder: str, positions: int = 64) -> None:
    """Write a plain Post-LN model in CTranslate2's format."""
    from ctranslate2.specs import TransformerSpec

    config = plain.config
    assert config.norm_eps == 1e-5, "CTranslate2's own"
    spec = TransformerSpec.from_config((config.depths.encoder, config.depths.decoder), config.heads, pre_norm=False)
    set_stack(spec.encoder, spec.encoder.embeddings[0], plain.encoder, plain.source_embedding or plain.embedding, positions)
    set_stack(spec.decoder, spec.decoder.embeddings, plain.decoder, plain.embedding, positions)
    table = (plain.vocabulary or plain.embedding).weight
    spec.decoder.projection.weight = array(table)
    words = [WORDS.get(token, str(token)) for token in range(len(table))]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.validate()
    spec.optimize()
    spec.save(folder)


def set_stack(spec: Any, embeddings: Any, stack: Any, table: Any, positions: int) -> None:
    """CTranslate2 has a single eps, but folding gives a stack's first norm a different one: undo that by scaling the tables."""
    first = stack.blocks[0].self_attention.out_norm.eps
    scale = (1e-5 / first) ** 0.5
    embeddings.weight = array(table.weight * (table.scale * scale))
    spec.scale_embeddings = False
    spec.position_encodings.encodings = array(sinusoids(torch.arange(positions), table.weight.shape[1], torch.float32) * scale)
    for index, (layer, block) in enumerate(zip(spec.layer, stack.blocks, strict=True)):
        undo = scale if index == 0 else 1.0
        attention = block.self_attention
        set_linear(layer.self_attention.linear[0], attention.f.query_key_value, weight_gain=1 / undo)
        set_linear(layer.self_attention.linear[1], attention.f.output, weight_gain=undo, bias_gain=undo)
        set_norm(layer.self_attention.layer_norm, attention.out_norm)
        if hasattr(layer, "attention"):
            reading = block.cross_attention
            set_linear(layer.attention.linear[0], reading.f.query)
            set_linear(layer.attention.linear[1], reading.f.key_value)
            set_linear(layer.attention.linear[2], reading.f.output)
            set_norm(layer.attention.layer_norm, reading.out_norm)
        set_linear(layer.ffn.linear_0, block.feedforward.f.input)
        set_linear(layer.ffn.linear_1, block.feedforward.f.output)
        set_norm(layer.ffn.layer_norm, block.feedforward.out_norm)


def set_linear(spec: Any, projection: Any, weight_gain: float = 1.0, bias_gain: float = 1.0) -> None:
    spec.weight, spec.bias = array(projection.weight * weight_gain), array(projection.bias * bias_gain)


def set_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = array(norm.weight), array(norm.bias)


def array(tensor: Tensor) -> Any:
    return tensor.detach().numpy().copy()


def our_decoder(shape: dict[str, int], system: str) -> Callable[[Tensor, int], list[list[int]]]:
    model = plain_translator(shape)
    if system == "ours through modules":
        # A hook that does nothing, because such a model is not rewritten.
        model.register_forward_hook(lambda *_: None)
    else:
        model = FAST.decoding_form(FAST.bind(model), int8=system == "ours int8")

    def decode(source: Tensor, beam: int) -> list[list[int]]:
        options: dict[str, Any] = {"method": "greedy"} if beam == 1 else {"beam": beam, "length_penalty": 1.0}
        config = SearchConfig(**options, max_length_factor=0.0, max_length_extra=LENGTH)
        return [hypotheses[0].tokens for hypotheses in generate(model, source, config)]

    return decode


def their_decoder(shape: dict[str, int], compute_type: str, threads: int) -> Callable[[Tensor, int], list[list[int]]]:
    import ctranslate2

    with tempfile.TemporaryDirectory() as folder:
        save_as_ctranslate2(plain_translator(shape), folder)
        translator = ctranslate2.Translator(folder, compute_type=compute_type, intra_threads=threads, inter_threads=1)

    def decode(source: Tensor, beam: int) -> list[list[int]]:
        rows = [[WORDS.get(token, str(token)) for token in row if token != PAD] for row in source.tolist()]
        found = translator.translate_batch(rows, beam_size=beam, length_penalty=1.0, max_decoding_length=LENGTH)
        return [[int(name) if name.isdigit() else 1 for name in each.hypotheses[0]] for each in found]

    return decode


def serve(pipe: Any, system: str, shape: dict[str, int], threads: int) -> None:
    """Decode the requests from the pipe: (source, beam) to (tokens, seconds, fraction of a core used by other processes)."""
    torch.set_num_threads(threads)
    if system.startswith("ours"):
        decode = our_decoder(shape, system)
    else:
        decode = their_decoder(shape, "int8" if "int8" in system else "float32", threads)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        others, start = -work_of_others(), time.perf_counter()
        tokens = decode(*task)
        seconds = time.perf_counter() - start
        pipe.send((tokens, seconds, (others + work_of_others()) / seconds))


def work_of_others() -> float:
    """CPU seconds that all other processes have used."""
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:2])


def measure(pipes: dict[str, Any], source: Tensor, beam: int, rounds: int) -> dict[str, Any]:
    outputs: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[tuple[float, float]]] = {system: [] for system in pipes}
    for attempt in range(4 * rounds + 1):
        for system, pipe in pipes.items():
            pipe.send((source, beam))
            outputs[system], taken, others = pipe.recv()
            if attempt:  # the first is a warm-up
                seconds[system].append((taken, others))
        if all(sum(others < 0.1 for _, others in each) >= rounds for each in seconds.values()):
            break
    quiet = {system: [taken for taken, others in each if others < 0.1] for system, each in seconds.items()}
    times = {system: each or [taken for taken, _ in seconds[system]] for system, each in quiet.items()}
    best = {system: min(each) for system, each in times.items()}
    tokens = sum(map(len, outputs["ours"]))
    by_int8 = {
        f"{system}_int8_times_fp32": {
            "best": round(best[system] / best[f"{system} int8"], 2),
            "median": round(median(times[system]) / median(times[f"{system} int8"]), 2),
        }
        for system in ("ours", "ctranslate2")
        if f"{system} int8" in times
    }
    return {
        "batch": len(source),
        "beam": beam,
        "tokens": tokens,
        "sentences_equal": {
            system: sum(a == b for a, b in zip(outputs["ours"], each, strict=True)) for system, each in outputs.items()
        },
        "undisturbed_rounds": {system: len(each) for system, each in quiet.items()},
        "seconds": {system: round(each, 4) for system, each in best.items()},
        "median_seconds": {system: round(median(each), 4) for system, each in times.items()},
        "tokens_per_second": {system: round(tokens / each, 1) for system, each in best.items()},
        "sentences_per_second": {system: round(len(source) / each, 2) for system, each in best.items()},
        "times_ctranslate2": round(best["ctranslate2"] / best["ours"], 2),
        "times_ctranslate2_by_median": round(median(times["ctranslate2"]) / median(times["ours"]), 2),
        **by_int8,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU decoding speed compared with CTranslate2.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--int8", action="store_true", help="measure int8 instead of the model run through its modules")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = []
    for name, shape in SHAPES.items():
        pipes, workers = {}, []
        for system in INT8_SYSTEMS if options.int8 else SYSTEMS:
            pipes[system], end = context.Pipe()
            workers.append(context.Process(target=serve, args=(end, system, shape, options.threads), daemon=True))
            workers[-1].start()
            pipes[system].recv()
        for batch, beam in [(1, 1), (1, 5), (16, 1), (16, 5)]:
            rows.append({"model": name, **measure(pipes, sources(batch, shape["vocab_size"]), beam, options.rounds)})
            print(rows[-1], flush=True)
        for pipe, worker in zip(pipes.values(), workers, strict=True):
            pipe.send(None)
            worker.join()
    document = {
        "command": " ".join(["python benchmarks/decoding/beside_ctranslate2.py", *sys.argv[1:]]),
        "hardware": f"{processor()}, {os.cpu_count()} cores, {options.threads} threads",
        "versions": {
            **{package: version(package) for package in ("torch", "ctranslate2")},
            "python": platform.python_version(),
            "kilolayer": kl.__version__,
        },
        "seed": 0,
        "rounds": options.rounds,
        "models": SHAPES,
        "rows": rows,
    }
    options.results.write_text(json.dumps(document, indent=1) + "\n")


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
