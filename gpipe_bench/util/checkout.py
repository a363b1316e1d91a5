"""Which commit of this project runs, for the provenance of rows: asks git, loads nothing else.

Nothing here may fail: what is unknown stays empty.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).resolve().parents[1]
_GIT_TIMEOUT_S: Final = 30


def checkout(folder: Path = _SOURCE) -> tuple[str, bool | None]:
    """Commit of the checkout that holds ``folder``, and whether it has uncommitted changes.

    ('', None) without git, outside a checkout, and for an installed copy inside somebody else's checkout.
    """
    if not _git(folder, "ls-files", "--", "."):
        return "", None
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    # A new file counts where it could be imported; a configuration or a result beside the sources changes nothing.
    added = _git(folder, "status", "--porcelain", "--", str(folder), os.path.realpath(folder / "models"))
    if not commit or changed is None or added is None:
        return "", None
    return commit, bool(changed or added)


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints about ``folder``; None when it fails or is not there."""
    # Variables such as GIT_DIR, set while a hook runs, would point git to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_TIMEOUT_S,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
