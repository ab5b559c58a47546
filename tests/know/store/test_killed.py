"""kill -9 at any moment leaves the old base or the new one, and the next build cleans up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_killed_builds_leave_the_old_base_or_the_new_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.know.store.killed_builds", str(tmp_path)]
    root = Path(__file__).parents[3]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["kills"] >= 24
    assert report["after_commit"] >= 1  # and before it: most
    assert report["ended"]  # every stage of a build was reached
