"""Error text for an import of pycoll without its C++ core."""

from __future__ import annotations

import sys
from pathlib import Path


def explanation() -> str:
    """Error text: the missing file, its folder, and the command that builds it."""
    folder = Path(__file__).resolve().parent
    text = f"pycoll: the C++ core is not built: no pycoll._core for this Python in {folder}"
    others = sorted(path.name for path in folder.glob("_core.*.so"))
    if others:
        version = ".".join(map(str, sys.version_info[:2]))
        text += f" (found {', '.join(others)}; this is Python {version})"
    if (folder.parent / "setup.py").is_file():
        return (
            f"{text}. This is a checkout: run `pip install -e {folder.parent}` or `make build` "
            "there, or start Python in another folder to use an installed pycoll"
        )
    return f"{text}. Install pycoll again: `pip install --force-reinstall --no-deps pycoll`"
