"""The public surface: its names and signatures, its words, its examples, and what it does not import."""

import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import linlap as ll
from linlap import errors

PACKAGE = Path(ll.__file__).parent
MODULES = sorted(m.name for m in pkgutil.walk_packages(ll.__path__, "linlap."))


def members(thing: Any) -> set[str]:
    """Public attributes of a class, fields included."""
    own = {f.name for f in fields(thing)} if is_dataclass(thing) else set()
    return own | {name for name in dir(thing) if not name.startswith("_")}


# --- names

PROMISED = {
    "": "fit linearise inspect evaluate compare save load testing errors Gaussian Categorical Bernoulli Poisson Posterior "
    "Predictive Structure Curvature Factor",
    "Posterior": "log_evidence log_evidence_error prior groups effective_dimensions noise weights history status predict sample",
    "Predictive": "mean cov std epistemic_std epistemic_score noise_std probs interval log_prob sample",
    "testing": "check_curvature",
    "errors": "LinlapError InputError NetworkError FileError LinlapWarning",
}


@pytest.mark.parametrize("where", PROMISED, ids=lambda where: where or "linlap")
def test_promised_names_exist(where):
    thing = getattr(ll, where) if where else ll
    assert set(PROMISED[where].split()) <= members(thing)


def test_the_list_of_public_names_is_sorted_and_true():
    assert sorted(ll.__all__) == ll.__all__
    assert all(hasattr(ll, name) for name in ll.__all__)
    assert {name for name in PROMISED[""].split()} <= set(ll.__all__)


def test_fit_has_the_promised_signature():
    """Three arguments by place, the others by keyword; whatever else there is can be left out."""
    found = inspect.signature(ll.fit).parameters
    by_place = [name for name, p in found.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert by_place == ["net", "data", "likelihood"]
    defaults = {name: p.default for name, p in found.items() if name not in by_place}
    promised = {
        "model": "linear",
        "prior": "auto",
        "curvature": "auto",
        "evidence_at": "optimum",
        "params": None,
        "held_out": None,
        "n_data": None,
        "seed": 0,
        "progress": None,
    }
    assert {name: defaults.get(name, "missing") for name in promised} == promised
    assert inspect.Parameter.empty not in defaults.values()


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (ll.Posterior.predict, {"x": ..., "mean": "network"}),
        (ll.Posterior.sample, {"draws": ..., "seed": None}),
        (ll.Predictive.probs, {"method": "probit", "samples": 1000}),
        (ll.Predictive.interval, {"level": 0.9}),
        (ll.Predictive.log_prob, {"targets": ...}),
        (ll.Predictive.sample, {"draws": ..., "seed": None}),
        (ll.Gaussian, {"noise": None, "per_output": False}),
        (ll.linearise, {"net": ..., "params": None}),
        (ll.inspect, {"net": ..., "x": ..., "n_data": None}),
        (ll.evaluate, {"post": ..., "data": ..., "unfamiliar": None}),
        (ll.compare, {"posteriors": ...}),
        (ll.save, {"post": ..., "path": ...}),
        (ll.load, {"path": ..., "net": ..., "curvature": None}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_other_signatures(function, arguments):
    found = {n: p.default for n, p in inspect.signature(function).parameters.items() if n != "self"}
    assert {n: ... if found[n] is inspect.Parameter.empty else found[n] for n in arguments} == arguments
    assert list(found)[: len(arguments)] == list(arguments)


def test_the_status_is_a_flag_and_a_message():
    assert {"converged", "message"} <= members(ll.posterior.Status)


def test_every_error_is_one_of_ours_and_listed():
    """In the tree that the module's docstring draws."""
    own = {name: c for name, c in vars(errors).items() if isinstance(c, type) and c.__module__ == "linlap.errors"}
    warned = {name for name, c in own.items() if issubclass(c, Warning)}
    assert all(issubclass(own[name], errors.LinlapWarning) for name in warned)
    for name in own.keys() - warned:
        assert issubclass(own[name], errors.LinlapError)
        assert f" {name} " in errors.__doc__ or f" {name}\n" in errors.__doc__


def test_one_version():
    assert ll.__version__ == version("linlap")


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


# --- words


@pytest.mark.parametrize("name", ll.__all__)
def test_every_public_name_says_what_it_is(name):
    """And so does everything public in it; a docstring that is only inherited from a builtin does not count."""
    thing = getattr(ll, name)
    assert inspect.getdoc(thing)
    if not isinstance(thing, type):
        return
    assert "__doc__" in vars(thing)
    assert not thing.__doc__.startswith(f"{name}("), "a dataclass without a docstring shows its signature"
    for member, value in vars(thing).items():
        if not member.startswith("_") and (callable(value) or isinstance(value, property | staticmethod | classmethod)):
            assert inspect.getdoc(value), member


@pytest.mark.parametrize("name", ["fit", "linearise", "inspect", "evaluate", "compare", "save", "load", "Posterior"])
def test_what_people_call_has_an_example(name):
    assert ">>> " in inspect.getdoc(getattr(ll, name))


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {t.name: t for m in ["linlap", *MODULES] for t in finder.find(importlib.import_module(m)) if t.examples}
    return list(found.values())


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_examples_do_what_they_say(example):
    said: list[str] = []
    torch.manual_seed(0)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert runner.run(example, out=said.append).failed == 0, "".join(said)


# --- imports


def test_everything_imports_without_the_optional_packages():
    """Each module, with all that is optional made impossible to import."""
    code = f"""
import importlib, sys
for optional in ("matplotlib", "sklearn", "torchvision", "pandas", "pytest", "hypothesis", "sybil"):
    sys.modules[optional] = None
for module in {["linlap", *MODULES]!r}:
    importlib.import_module(module)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the house


def test_the_architecture_names_every_module_and_no_other():
    text = (PACKAGE.parent.parent / "ARCHITECTURE.md").read_text("utf-8")
    files = {p.relative_to(PACKAGE).with_suffix("").as_posix() for p in PACKAGE.rglob("*.py") if p.stem != "__init__"}
    table = text.partition("## Every module in one line")[2].partition("##")[0]
    named = {
        name
        for line in table.splitlines()
        for name in re.findall(r"`([\w/]+)`", line.split("|")[1] if "|" in line else "")
    }
    assert named == files
