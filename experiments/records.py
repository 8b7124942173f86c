"""Results on disk: one JSON file a measurement, written at once or not at all, so that a run can be continued."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import linlap

RESULTS = Path(__file__).parent / "results"


def read(path: Path) -> dict[str, Any]:
    """What was written, an empty dictionary if nothing was."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, content: dict[str, Any] | str) -> None:
    """A dictionary as JSON, a text as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def versions() -> dict[str, str]:
    """Of everything that the numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "linlap": linlap.__version__,
        "commit": commit(),
    }


def commit() -> str:
    """The commit of the library in use, empty outside a repository."""
    folder = Path(linlap.__file__).parent
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=False
    )
    return os.environ.get("LINLAP_COMMIT", found.stdout.strip())


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
