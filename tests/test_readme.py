"""The README's Python blocks are run as printed, one after the other, in an empty folder."""

from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

README = Path(__file__).parents[1] / "README.md"


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    examples = list(Sybil(parsers=[PythonCodeBlockParser()]).parse(README).examples())
    assert len(examples) >= 3
    for example in examples:
        example.evaluate()
    assert (tmp_path / "post.safetensors").exists()
