"""The project's filters and modules as Ansible loads them, for the tests of roles."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import ansible.module_utils

ROOT = Path(__file__).resolve().parents[2]
UTILS = str(ROOT / "plugins" / "module_utils")
if UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(UTILS)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"arborist_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[loaded.__name__] = loaded  # dataclasses look their module up by name
    spec.loader.exec_module(loaded)
    return loaded


def module(name: str) -> ModuleType:
    """The module ``plugins/modules/<name>.py``."""
    return _load(ROOT / "plugins" / "modules" / f"{name}.py")


filters = _load(ROOT / "plugins" / "filter" / "sglang.py")
