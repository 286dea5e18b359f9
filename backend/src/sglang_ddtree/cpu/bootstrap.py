"""Loaded at interpreter start by ``sglang_ddtree_cpu.pth`` on a CPU engine. Light: it only watches for two imports."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class Finder(MetaPathFinder):
    """Offers the stand-in for ``sgl_kernel`` where the real one is absent, and readies torch for torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for ``sgl_kernel``; for ``torchvision`` only prepare and let the ordinary import go on."""
        if fullname == "sgl_kernel" and PathFinder.find_spec(fullname) is None:
            return importlib.util.spec_from_file_location(fullname, Path(__file__).with_name("sgl_kernel.py"))
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare_vision_operators()
            sys.meta_path.insert(0, self)
        return None


_libraries: list[Any] = []


def _declare_vision_operators() -> None:
    """Declare the operators torchvision's Python half registers fakes for.

    torchvision's compiled half does not load beside a CPU build of torch when it was built for CUDA, and its import
    then fails for want of these two.
    """
    import torch

    if _libraries or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


if not any(isinstance(finder, Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, Finder())
