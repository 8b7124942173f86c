"""Every error and warning: its kind, its whole message, that it says rule, what came and remedy, and where it points."""

import ast
import re
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import linlap as ll
import refusals
from linlap import errors
from refusals import Refused, X, Y, net
from refused_data import DATA
from refused_networks import NETWORKS
from refused_options import ARGUMENTS, WARNINGS

SOURCE = Path(ll.__file__).parent
REFUSED = {
    f"{part}: {name}": row for part, table in (("data", DATA), ("network", NETWORKS)) for name, row in table.items()
}
REFUSED |= {f"argument: {name}": row for name, row in ARGUMENTS.items()}
ELSEWHERE = {"store.py": "test_store_refusals.py", "demo.py": "test_demo.py", "testing.py": "test_conformance.py"}
"""Modules whose errors have their tests in another file."""


class Site(NamedTuple):
    """A place in the source."""

    file: str
    line: int


class Caught(NamedTuple):
    """What came out, and the place it was raised or issued at."""

    kind: type[BaseException]
    message: str
    site: Site


@lru_cache
def refused(name: str) -> Caught:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as caught:  # noqa: PT011 (the tests look at it)
            REFUSED[name].trigger()
    last = caught.traceback[-1]
    return Caught(caught.type, str(caught.value), Site(Path(last.path).name, last.lineno + 1))


@lru_cache
def warned(name: str) -> Caught:
    """The warning of the kind wanted, with the place that issued it, which is not the place it points to."""
    sites, issue = [], warnings.warn

    def noted(message: Any, *arguments: Any, **keywords: Any) -> None:
        caller = sys._getframe(1)
        sites.append(Caught(arguments[0], str(message), Site(Path(caller.f_code.co_filename).name, caller.f_lineno)))
        issue(message, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(warnings, "warn", noted)
        WARNINGS[name].trigger()
    (found,) = (site for site in sites if issubclass(site.kind, WARNINGS[name].kind))
    return found


def fits(row: Refused, message: str) -> bool:
    """Is it the message, where "…" is any text?"""
    return re.fullmatch(re.escape(row.message).replace("…", ".*"), message, re.DOTALL) is not None


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_the_rule_what_came_and_what_to_do(name):
    caught, row = refused(name), REFUSED[name]
    assert caught.kind is row.kind
    assert fits(row, caught.message), caught.message
    assert re.fullmatch(r".{10,}, but .{3,}: .{5,}", caught.message, re.DOTALL), caught.message
    assert issubclass(caught.kind, errors.LinlapError)


@pytest.mark.parametrize("name", WARNINGS)
def test_what_is_warned_about_says_what_to_do(name):
    caught, row = warned(name), WARNINGS[name]
    assert caught.kind is row.kind
    assert fits(row, caught.message), caught.message
    assert issubclass(caught.kind, errors.LinlapWarning)


@pytest.mark.parametrize("name", [name for name in WARNINGS if name != "jitter"])
def test_warnings_point_to_the_line_that_called(name):
    """Not to a line of ours, nor to one further out; "jitter" comes from too deep for that."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        WARNINGS[name].trigger()
    places = {(Path(w.filename).name, w.lineno) for w in seen if issubclass(w.category, WARNINGS[name].kind)}
    lines = Path(refusals.__file__).read_text(encoding="utf-8").splitlines()
    assert len(places) == 1
    assert all(file == "refusals.py" and "ll.fit(" in lines[line - 1] for file, line in places)


# --- nothing is raised that has no test


def raises() -> Iterator[tuple[str, ast.stmt | ast.expr, str]]:
    """Every place of the source that raises an error of ours or warns: file, statement, kind."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield path.name, node, ast.unparse(node.exc.func)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                yield path.name, node, "warning"


def test_every_raise_and_every_warning_has_a_test_of_its_message():
    hit = {refused(name).site for name in REFUSED} | {warned(name).site for name in WARNINGS}
    missing = [
        f"{file}:{node.lineno} {kind}"
        for file, node, kind in raises()
        if file not in ELSEWHERE
        and not any(Site(file, line) in hit for line in range(node.lineno, node.end_lineno + 1))
    ]
    assert not missing


def test_every_raise_is_of_an_error_of_ours():
    kinds = {kind for _, _, kind in raises()} - {"warning"}
    assert all(issubclass(getattr(errors, kind), errors.LinlapError) for kind in kinds)


@pytest.mark.parametrize("module", ELSEWHERE)
def test_the_errors_of_the_other_modules_have_their_tests(module):
    text = (Path(__file__).parent / ELSEWHERE[module]).read_text(encoding="utf-8")
    assert all(kind in text for file, _, kind in raises() if file == module)


def test_the_tree_of_errors_is_the_one_described():
    """Every error and warning is below the base, and its place is that of the module's own drawing."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert all(issubclass(kind, errors.LinlapError | errors.LinlapWarning) for kind in kinds)
    parents: dict[int, str] = {0: "LinlapError"}
    for indent, name, builtin in re.findall(r"^    ([ │]*)[├└]── (\w+)(?: \((\w+)\))?", errors.__doc__, re.MULTILINE):
        depth = len(indent) // 4 + 1
        parents[depth] = name
        assert issubclass(getattr(errors, name), getattr(errors, parents[depth - 1]))
        assert not builtin or issubclass(getattr(errors, name), getattr(__builtins__, builtin, Exception))


# --- what is refused leaves what is right alone


@pytest.mark.parametrize("likelihood", [ll.Gaussian(), ll.Poisson(), ll.Bernoulli()], ids=lambda made: made.name)
def test_flat_targets_are_those_of_one_output(likelihood):
    """[n] is taken for an output [n, 1]; nothing else broadcasts."""
    counts = Y.abs().round().clamp(max=1)
    posts = [ll.fit(net(), (X, y), likelihood, progress=False) for y in (counts, counts[:, 0])]
    assert posts[0].log_evidence == posts[1].log_evidence
