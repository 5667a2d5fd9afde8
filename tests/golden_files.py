"""Golden files: what a program prints, kept beside the tests.

`UPDATE_GOLDEN=1` in the environment writes them anew; look at the difference before committing it.
"""

from __future__ import annotations

import os
from pathlib import Path

UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"


def check_golden(path: Path, text: str) -> None:
    """Compare a text with its golden file, or write that anew."""
    if UPDATE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name}; see tests/golden_files.py"
