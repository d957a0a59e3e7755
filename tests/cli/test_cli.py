"""The command as a user meets it: in a shell."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest

import kilolayer as kl
from kilolayer.cli.main import main, subcommands
from kilolayer.config import build

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "kilolayer"]


def shell(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, cwd=ROOT, check=False)


def test_help_answers_at_once_and_without_torch() -> None:
    def once() -> float:
        before = getrusage(RUSAGE_CHILDREN)
        assert shell("--help").returncode == 0
        after = getrusage(RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(once() for _ in range(3)) < 0.3
    leaving = "atexit.register(lambda: os._exit(3 if 'torch' in sys.modules else 4))"
    probe = f"import sys, atexit, os; {leaving}; from kilolayer.cli.main import main; main([])"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode == 4


@pytest.mark.parametrize("verb", subcommands())
def test_every_verb_has_its_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert subcommands()[verb].summary.split(",")[0] in " ".join(capsys.readouterr().out.split())


def help_of_train(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_is_wrapped_to_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, shown = (help_of_train(each, monkeypatch, capsys) for each in (10_000, columns))
    # A single word, such as a path or a list without spaces, may be longer than its column: it is never broken.
    assert all(len(line) <= columns or len(line.split()) == 1 for line in shown.splitlines())
    start = "at the top of the file:"
    assert shown.partition(start)[2].split() == whole.partition(start)[2].split()
    lines = shown.splitlines()
    path = next(index for index, line in enumerate(lines) if line.startswith("  kv_heads "))
    assert lines[path + 1].startswith(" " * 23)
    assert not lines[path + 1][23:].startswith(" ")


def test_help_names_what_an_option_may_be(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of_train(10_000, monkeypatch, capsys)
    assert "(inverse_sqrt, cosine, linear, warmup_stable_decay, constant) [inverse_sqrt]" in shown
    lines = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert (lines.count("moe"), lines.count("head")) == (1, 1)  # what all tasks share is told once
    assert main(["recipes", "admin"]) == 0
    assert "(paper, released, closed) [paper]" in capsys.readouterr().out


@pytest.mark.slow
def test_plan_of_a_thousand_layers_within_ten_seconds_and_a_gigabyte() -> None:
    # The peak comes from the kernel's page on the process: what wait4 tells counts the memory of the test that forked it too.
    tell = "print(time.process_time(), open('/proc/self/status').read(), file=sys.stderr)"
    probe = f"import sys, time; from kilolayer.cli.main import main; code = main(sys.argv[1:]); {tell}; sys.exit(code)"
    words = [sys.executable, "-c", probe, "plan", "configs/deepnet-1000.toml", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    plan, peak = json.loads(done.stdout), re.search(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert peak is not None
    assert int(peak[1]) < 1_000_000
    assert float(done.stderr.split()[0]) < 10  # of the processor: other tests run beside this one
    assert plan["parameters"]["total"] == pytest.approx(3.7e9, rel=0.02)
    assert plan["constants"]["encoder"]["alpha"] == pytest.approx(5.6482, abs=1e-4)
    assert plan["training_memory"]["peak_recomputed"] < plan["training_memory"]["peak"]


def test_plan_prints_what_it_computed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model.dim", "64", "--model.heads=4", "--model.layers", "2", "--length", "8"]) == 0
    shown = capsys.readouterr().out
    for part in ("Parameters", "Constants of DeepNorm", "FLOPs", "Training memory", "each layer recomputed", "Decoding memory"):
        assert part in shown
    assert "64 x 8 tokens per side" in shown


@pytest.mark.parametrize("options", [[], ["--train.lr", "1e-3"], ["--train.shard", "full", "--processes", "2"]])
def test_plan_of_a_model_has_one_batch_whatever_the_options_of_training(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model.dim", "64", "--model.heads=4", "--model.layers", "2", *options]) == 0
    assert "64 x 64 tokens per side" in capsys.readouterr().out


def test_plan_shows_what_a_recipe_changes_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model.recipe.name", "complete_p", "--model.shape", "decoder", "--model.layers", "8", "--model.dim", "1024"]
    assert main(["plan", *options]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["decoder", "ffn_in", "0.25", "0.0625", "4"] in rows
    assert main(["plan", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rates"]["decoder embedding"] == {"lr": 0.5, "eps": 0.125, "decay": 2.0}
    assert main(["plan", "--model.layers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rates"] == {}
    assert main(["recipes", "complete_p"]) == 0
    assert kl.recipes.find("complete_p").training in capsys.readouterr().out


def test_plan_shows_what_each_of_several_processes_holds_and_sends(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "--model.dim", "64", "--model.heads", "4", "--model.layers", "2"]
    machines = ["--machines", "2", "--bandwidth", "50", "--bandwidth-inside", "400"]
    plans = {}
    for shard, words in {"none": ["--bandwidth", "50"], "full": [], "hybrid": machines}.items():
        typed = [*small, "--processes", "8", "--train.shard", shard, *words]
        assert main(typed) == 0
        shown = capsys.readouterr().out
        assert "Training memory of each of 8 processes" in shown
        assert ("gathered matrices" in shown) == (shard != "none")
        assert ("between machines" in shown) == (shard == "hybrid")
        assert ("time, if nothing is computed meanwhile" in shown) == bool(words)
        assert main([*typed, "--json"]) == 0
        plans[shard] = json.loads(capsys.readouterr().out)
    assert [plan["division"]["shards"] for plan in plans.values()] == [1, 8, 4]
    none, full, hybrid = (plan["training_memory"]["peak_recomputed"] for plan in plans.values())
    assert full < hybrid < none
    sent = plans["hybrid"]["sent"]
    inside, between = sent["gathers"] + sent["scatters"], sent["copies"] + sent["sums"]
    assert sent["seconds"] == pytest.approx(inside / 400e9 + between / 50e9)
    assert main([*small, "--processes", "8", "--train.shard", "full", "--train.reshard_after_forward", "false"]) == 0
    shown = capsys.readouterr().out
    assert "gathered matrices: tables, all layers" in shown
    assert "matrices, gathered once" in shown


def test_plan_of_a_sparse_decoder_names_its_experts_and_no_sides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model.shape", "decoder", "--model.layers", "2", "--model.moe.experts", "8"]) == 0
    shown = capsys.readouterr().out
    assert "FFN 2048, 8 experts, top-2, in every 2nd layer\n" in shown
    assert "per side" not in shown


def test_a_translators_plan_has_the_tables_of_its_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.toml"
    file.write_text('[model]\ndim = 64\nheads = 4\nlayers = 1\n[data]\nfolder = "."\ndirections = ["en-de"]\n[tokenizer]\n')
    for words, size in (([], 8000), (["--tokenizer.vocab_size", "300"], 300), (["--model.vocab_size", "500"], 500)):
        assert main(["plan", str(file), *words, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["model"]["vocab_size"] == size
        assert plan["parameters"]["parts"]["embedding"] == size * 64
    assert main(["plan", str(file), "--tokenizer.shared", "false", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"]["parts"]["source embedding"] == plan["parameters"]["parts"]["embedding"] == 8000 * 64


def test_typed_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, file = tmp_path / "base.toml", tmp_path / "small.toml"
    base.write_text('[model]\ndim = 64\nheads = 4\nlayers = 2\nrecipe = "admin"\n')
    file.write_text('extends = "base.toml"\n[model]\nheads = 2\n')
    assert main(["plan", str(file), "--model.layers", "3", "--model.recipe.start", "closed", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["dim"], model["heads"], model["layers"], model["ffn_dim"]) == (64, 2, 3, 2048)
    assert model["recipe"] == {"name": "admin", "start": "closed", "weight": "derived", "init": "derived"}


def test_an_absent_value_can_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model.pad_id", "none", "--model.layers", "1", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["model"]
    assert table["pad_id"] == "none"
    assert build(kl.ModelConfig, table) == kl.ModelConfig(pad_id=None, layers=1)


def test_the_order_of_typed_options_does_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    words = [["--model.recipe", "admin"], ["--model.recipe.start", "closed"], ["--model.layers", "2"]]
    for order in (words, words[::-1]):
        assert main(["plan", "--json", *(word for pair in order for word in pair)]) == 0
        assert json.loads(capsys.readouterr().out)["model"]["recipe"]["start"] == "closed"


def test_tables_fit_a_narrow_terminal() -> None:
    command = f"{sys.executable} -m kilolayer recipes deepnorm"
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )
    assert "5.6482" in done.stdout
    assert "\u2026" not in done.stdout


@pytest.mark.matrix(6)
@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_config_can_be_planned(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--json", "--batch", "1", "--length", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["total"] > 0


def test_a_plan_says_that_the_warm_up_is_longer_than_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model.dim", "64", "--model.heads", "4", "--model.layers", "2", "--train.steps", "30"]
    assert main([*words, "--train.warmup_steps", "1000", "--json"]) == 0
    shown = capsys.readouterr()
    (warning,) = json.loads(shown.out)["warnings"]
    assert "the warm-up of 1,000 steps is longer than the run of 30" in warning
    assert shown.err == f"{warning}\n"
    assert main([*words, "--train.warmup_steps", "3"]) == 0
    assert capsys.readouterr().err == ""


def test_recipes_lists_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in kl.recipes.names()] == kl.recipes.names()


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", kl.recipes.names())
def test_every_recipe_can_be_described(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", name]) == 0
    shown = capsys.readouterr().out
    assert kl.recipes.find(name).equation in shown
    assert kl.recipes.find(name).paper in shown
    assert main(["recipes", name, "--json", "--encoder-layers", "12"]) == 0
    assert json.loads(capsys.readouterr().out)["constants"][0]["decoder"] is None


def test_constants_at_a_given_depth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "deepnorm", "--encoder-layers", "60", "--decoder-layers", "12"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines() if "60L-12L" in line] == [
        ["60L-12L", "encoder", "2.6331", "0.2676"],
        ["60L-12L", "decoder", "2.4495", "0.2887"],
    ]


MISTAKES = {
    "plna": "did you mean 'plan'",
    "--hlep": "did you mean '--help'",
    "plan --btch 3": "did you mean '--batch'",
    "plan --batch x": "'x' is not a whole number",
    "plan --layers 100": "with its table: --model.layers",
    "train --top_k 2": "with its table: --model.moe.top_k, --search.top_k",
    "plan --batch 0": "must be 1 to",
    "plan --length 99999999999": "must be 1 to",
    "plan --train.shard full": "--processes 8",
    "plan --train.shard hybrid --processes 8": "--machines 2",
    "plan --train.shard hybrid --processes 9 --machines 2": "9 processes on 2 machines",
    "plan --train.shard full --processes 8 --machines 2": 'set train.shard to "hybrid"',
    "plan --train.shard full --processes 8 --train.shard_unit 99": "allowed: 1 to",
    "plan --model.moe.experts 8 --processes 3": "8 experts cannot be shared evenly by 3 processes",
    "plan --bandwidth 50": "one process sends nothing",
    "plan --processes 8 --bandwidth 50 --bandwidth-inside 400": "train.shard",
    "plan --processes 8 --bandwidth 0": "not a number of GB per second",
    "plan --model.layers 3 --model.encoder_layers 4 --model.decoder_layers 5": "layers=3 has no effect",
    "train --task causal_lm": "--task cannot be set on the command line",
    "translate runs/none in.txt": "kilolayer translate RUN < in.txt",
    "translate runs/none --search.beam 3": "this is not a run",
    "plan --model.encoder 3": "did you mean",
    "train --data.directions en-de": 'directions = ["en-de"]',
    "recipes --encoder-layers 6": "name the recipe first",
    "plan --model.final_norm true": "no final norm",
    "plan --model.dmi 3": "did you mean 'dim'",
    "plan --modle.dim 3": "did you mean 'model'",
    "plan --model.dim": "has no value",
    "plan --model.heads 7": "does not divide",
    "plan --model.layers 0": "layers must be at least 1",
    "plan --model.recipe deepnrom": "did you mean 'deepnorm'",
    "plan --model.recipe.name admin --model.recipe.weigth fixed": "did you mean 'weight'",
    "plan nowhere.toml": "does not exist",
    "plan tests": "directory",
    "plan LICENSE": "not valid TOML",
    "plan one.toml two.toml": "does not take the argument 'two.toml'",
    "plan --precision fp16": "invalid choice",
    "recipes deepnrom": "did you mean 'deepnorm'",
    "recipes admin --model.recipe.strat closed": "did you mean 'start'",
    "recipes deepnorm --encoder-layers -3": "must be 0 to 10,000",
    "recipes --model.recipe.start closed": "name the recipe first",
    "recipes admin --recipe.start closed": "with --model.recipe.NAME",
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("line", "message"), MISTAKES.items())
def test_mistakes_are_told_in_three_lines(line: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(line.split()) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len(shown.err.splitlines()) <= 3
    assert not shown.out


def test_files_that_extend_each_other_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    assert main(["plan", str(tmp_path / "a.toml")]) == 2
    assert "extends itself" in capsys.readouterr().err


def test_a_file_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_bytes(b"[model]\n\xff\xfe")
    assert main(["plan", str(tmp_path / "a.toml")]) == 2
    assert "byte 9" in capsys.readouterr().err


def test_a_reader_that_leaves_ends_a_verb_as_it_ends_other_programs() -> None:
    line = f"set -o pipefail; {sys.executable} -m kilolayer recipes | true"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 128 + signal.SIGPIPE
