"""A pytest of its own inside a test: for what our conftest does to tests that go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def inner_pytest(folder: Path, conftest: str, test: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in the text ``test`` under the text ``conftest``, in ``folder``."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(test)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", folder, "-q", folder],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / '.pkg'}"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
