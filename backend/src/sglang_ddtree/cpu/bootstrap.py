"""Loaded at interpreter start by ``sglang_ddtree_cpu.pth`` on a CPU engine. Light: it only watches for three
imports.

In a process that starts a server it also holds what only costs time there: the garbage collector, which finds
nothing to free while a server imports (``boot.after_environment`` starts it again), and ``torch.compile``.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_libraries: list[Any] = []


class Finder(MetaPathFinder):
    """Stands in for an absent ``sgl_kernel``, and follows the imports of torch and torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for the modules named above, None for all others."""
        if fullname == "sgl_kernel" and PathFinder.find_spec(fullname) is None:
            return importlib.util.spec_from_file_location(fullname, Path(__file__).with_name("sgl_kernel.py"))
        if fullname == "torchvision":
            _declare_vision_operators()
        if fullname == "torch" and _starts_server() and "--enable-torch-compile" not in sys.orig_argv:
            spec = PathFinder.find_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _WithoutCompile(spec.loader)
            return spec
        return None


class _WithoutCompile(Loader):
    """Loads torch and makes ``torch.compile`` return functions as they are.

    SGLang decorates many that a CPU engine never calls, and the first decoration alone imports the whole
    compiler.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)

        def compile(model: Callable[..., Any] | None = None, **options: Any) -> Any:
            return (lambda function: function) if model is None else model

        module.compile = compile  # type: ignore[attr-defined]


def _declare_vision_operators() -> None:
    """Declare the operators torchvision's Python half registers fakes for.

    torchvision's compiled half does not load beside a CPU build of torch when it was built for CUDA, and its
    import then fails for want of these two.
    """
    import torch

    if _libraries or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def _starts_server() -> bool:
    return any(word in ("sglang.launch_server", "serve") for word in sys.orig_argv)


if _starts_server():
    gc.disable()
if not any(isinstance(finder, Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, Finder())
