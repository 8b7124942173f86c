"""Put what the demo prints, and its figure, into the README: `make readme`."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
README, FIGURE = ROOT / "README.md", ROOT / "docs" / "demo.png"
BLOCK = re.compile(r"(<!-- demo: begin[^\n]*-->\n```text\n)(.*?)(```\n<!-- demo: end -->)", re.DOTALL)


def printed(readme: str) -> str:
    """What the README says the demo prints."""
    found = BLOCK.search(readme)
    if found is None:
        raise SystemExit("README.md must hold one text block between the lines `demo: begin` and `demo: end`")
    return found[2]


def with_output(readme: str, output: str) -> str:
    """The README with another output of the demo."""
    printed(readme)
    return BLOCK.sub(lambda found: found[1] + output.strip("\n") + "\n" + found[3], readme)


def main() -> None:
    """Run the demo as a user would, in a folder of its own."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "linlap.cli", "demo"]
        output = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
        FIGURE.parent.mkdir(exist_ok=True)
        shutil.copyfile(Path(folder) / "linlap-demo" / "demo.png", FIGURE)
    README.write_text(with_output(README.read_text("utf-8"), output), "utf-8")


if __name__ == "__main__":
    main()
