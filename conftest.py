"""The README's Python blocks are run as printed, one after the other, in an empty folder."""

import os
from tempfile import TemporaryDirectory
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser


def begin(namespace: dict[str, Any]) -> None:
    """Go to the empty folder."""
    namespace["_folder"], namespace["_home"] = TemporaryDirectory(), os.getcwd()
    os.chdir(namespace["_folder"].name)


def end(namespace: dict[str, Any]) -> None:
    """Come back."""
    os.chdir(namespace["_home"])
    namespace["_folder"].cleanup()


pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], pattern="README.md", setup=begin, teardown=end).pytest()
