"""`import pycoll.ray` without Ray says what to install."""

from __future__ import annotations

import sys

import pytest


@pytest.mark.pure
def test_import_without_ray_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pycoll.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'pycoll\[ray\]'"):
        import pycoll.ray  # noqa: F401
