"""All tests run as on a CPU engine, also where this process imports SGLang itself."""

from __future__ import annotations

import os

import engine

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

# What the .pth file does at interpreter start when the variable is set before it.
import sglang_ddtree.cpu.bootstrap  # noqa: F401

# Servers of tests schedule as on an accelerator, where DDTREE has to work, unless a test says otherwise.
engine.ENVIRONMENT["SGLANG_DDTREE_CPU_OVERLAP"] = "1"
