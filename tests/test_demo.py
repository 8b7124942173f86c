"""The demo at a tiny size, and the command line that runs it."""

import re
import subprocess
import sys

import pytest
import torch

from linlap import cli, demo
from linlap.errors import MissingExtraError

pytestmark = pytest.mark.filterwarnings("ignore::linlap.errors.EvidenceWarning")


@pytest.fixture(scope="module")
def digits():
    return demo.classes(training=60, held_out=30, test=40, epochs=2)


@pytest.fixture(scope="module")
def diabetes():
    return demo.numbers(training=40, epochs=2)


@pytest.fixture(scope="module")
def gap():
    return demo.curve(examples=20, epochs=5)


def test_the_plain_network_comes_first(digits):
    table = demo.side_by_side(digits)
    assert list(table.scores) == ["network", "posterior", "posterior, linear mean", "posterior, held_out="]
    assert {"nll", "ece", "auroc epistemic"} <= set(table.posterior)


def test_one_seed_gives_one_posterior_and_leaves_the_random_state_alone(diabetes):
    before = torch.get_rng_state()
    again = demo.numbers(training=40, epochs=2).posterior
    assert again.log_evidence == diabetes.posterior.log_evidence
    assert torch.equal(before, torch.get_rng_state())


def test_all_figures_are_written(digits, diabetes, gap, tmp_path):
    written = demo.draw(digits, diabetes, gap, tmp_path / "figures")
    assert [path.name for path in written] == ["digits.png", "diabetes.png", "gap.png", "demo.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_place_is_put_in_words(gap):
    (words,) = demo.at(gap.posterior, (0.0,))
    assert re.match(r" *-?\d+\.\d\d, 90 % between .* epistemic sd \d+\.\d\d, noise \d+\.\d\d", words)


def test_the_run_prints_both_tables_and_where_the_figures_are(digits, diabetes, gap, tmp_path, monkeypatch, capsys):
    for name, value in (("classes", digits), ("numbers", diabetes), ("curve", gap)):
        monkeypatch.setattr(demo, name, lambda value=value: value)
    assert cli.main(["demo", "--out", str(tmp_path / "there")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("Posterior of") == 2
    assert printed.count("\nnetwork ") == 2
    assert str(tmp_path / "there" / "demo.png") in printed


def test_a_missing_extra_is_named(monkeypatch, capsys):
    def without(name, *rest, real=demo.import_module):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(demo, "import_module", without)
    with pytest.raises(
        MissingExtraError, match=r'needs the extra "demo", but matplotlib is not installed: pip install'
    ):
        demo.needed("matplotlib.figure")
    assert cli.main(["demo"]) == 2
    assert "matplotlib is not installed" in capsys.readouterr().err


def test_optional_dependencies_are_imported_only_where_they_are_used():
    code = "import sys, linlap.cli; assert not {'sklearn', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help_shows_an_example(arguments, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(arguments)
    assert "example: linlap demo --out figures" in capsys.readouterr().out


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert re.fullmatch(r"linlap \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_no_command_is_bad_input(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "COMMAND" in capsys.readouterr().err
