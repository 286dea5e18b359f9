"""Arborist's measuring side: what is tried, how it is measured, what is kept.

Imported on the measured host, so everything here needs only aiohttp, requests, pydantic and pyyaml;
``tuning.report`` and ``tuning.cli`` also use rich, and only when they draw a table.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("arborist")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
