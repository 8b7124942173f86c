"""The demo at a tiny size, and the command line that runs it."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linlap import cli, demo
from linlap.errors import MissingExtraError
from tools import readme

README = Path(__file__).parent.parent / "README.md"

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


def test_a_place_is_put_in_words(gap):
    (words,) = demo.at(gap.posterior, (0.0,))
    assert re.match(r" *-?\d+\.\d\d, 90 % between .* epistemic sd \d+\.\d\d, noise \d+\.\d\d", words)


@pytest.fixture(scope="module")
def printed(digits, diabetes, gap, tmp_path_factory):
    """What the run prints, and the folder it was given."""
    folder, out = tmp_path_factory.mktemp("demo") / "there", io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(out):
        for name, value in (("classes", digits), ("numbers", diabetes), ("curve", gap)):
            patched.setattr(demo, name, lambda value=value: value)
        assert cli.main(["demo", "--out", str(folder)]) == 0
    return out.getvalue(), folder


def test_the_run_prints_both_tables_and_where_the_figures_are(printed):
    text, folder = printed
    assert text.count("Posterior of") == 2
    assert text.count("\nnetwork ") == 2
    assert str(folder / "demo.png") in text
    assert max(map(len, text.replace(str(folder), "").splitlines())) <= 120


def test_all_figures_are_written(printed):
    written = list(printed[1].iterdir())
    assert {path.name for path in written} == {"digits.png", "diabetes.png", "gap.png", "demo.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def skeleton(text):
    """Its lines without numbers, blanks and folders, and without notes and warnings, which are the data's."""
    lines = []
    for line in text.strip().splitlines():
        if re.match(r"  note:|warning:| {4,6}\S", line):
            continue
        bare = re.sub(r"\S*/", "", re.sub(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#", line))
        lines.append(" ".join(re.sub("curvature (dense|dual)", "curvature …", bare).split()))
    return lines


def test_the_readme_shows_what_the_demo_prints(printed):
    """All but the numbers, for these networks are smaller: `make readme` brings it up to date."""
    assert skeleton(readme.printed(README.read_text("utf-8"))) == skeleton(printed[0])


@pytest.mark.slow
def test_the_readme_has_the_demos_numbers(tmp_path):
    """To a third, for training takes another path where sums are rounded differently: `make readme` brings them up to date."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        demo.run(tmp_path)
    shown, now = (
        [
            float(n.replace(",", ""))
            for n in re.findall(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?", text.partition("Figures")[0])
        ]
        for text in (readme.printed(README.read_text("utf-8")), out.getvalue())
    )
    assert len(shown) == len(now)
    assert all(abs(a - b) <= 0.05 + 0.35 * abs(b) for a, b in zip(shown, now, strict=True))


def test_the_readme_shows_a_small_figure():
    figure = README.parent / "docs" / "demo.png"
    assert "(docs/demo.png)" in README.read_text("utf-8")
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size < 200_000


def test_the_readme_is_brought_up_to_date_between_its_marks():
    text = "before\n<!-- demo: begin, … -->\n```text\nold\n```\n<!-- demo: end -->\nafter\n"
    new = readme.with_output(text, "\nnew \\1\n\n")
    assert new == text.replace("old", "new \\1")
    assert readme.printed(new) == "new \\1\n"
    with pytest.raises(SystemExit, match=r"README.md must hold one text block between the lines"):
        readme.with_output("before\nafter\n", "new")


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
