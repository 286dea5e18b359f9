"""``python -m sglang_ddtree check``: is this environment fit to serve DDTREE?"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version

from sglang_ddtree import __version__, versions


def main(argv: list[str] | None = None) -> int:
    """Print what was found as one JSON object; 0 when DDTREE can be served, 1 with the reason otherwise."""
    parser = argparse.ArgumentParser(prog="python -m sglang_ddtree")
    parser.add_subparsers(dest="command", required=True).add_parser(
        "check", help="verify that SGLang is a tested release and knows DDTREE"
    )
    parser.parse_args(argv)
    report = check()
    print(json.dumps(report))
    if report["error"] is not None:
        print(report["error"], file=sys.stderr)
        return 1
    return 0


def check() -> dict[str, object]:
    """What this environment holds; ``error`` is None when DDTREE can be served."""
    found = versions.installed()
    report: dict[str, object] = {
        "sglang_ddtree": __version__,
        "sglang": found,
        "torch": _version("torch"),
        "tested": list(versions.TESTED),
        "version_tested": found in versions.TESTED,
        "entry_point": any(point.name == "ddtree" for point in entry_points(group="sglang.srt.plugins")),
        "registered": False,
        "error": versions.refusal(),
    }
    if report["error"] is None:
        report["error"] = _register(report)
    return report


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _register(report: dict[str, object]) -> str | None:
    """Load the plugins as a server does and look DDTREE up; the reason if it is not there."""
    if not report["entry_point"]:
        return (
            "sglang-ddtree: its entry point is not installed; expected one named ddtree in sglang.srt.plugins"
        )
    try:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        load_plugins()
        SpeculativeAlgorithm.from_string("DDTREE")
        from sglang_ddtree.hooks import require_applied

        require_applied()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it goes into the report
        return f"sglang-ddtree: DDTREE is not registered: {error!r}; see SGLANG_PLUGINS and the log"
    report["registered"] = True
    return None


if __name__ == "__main__":
    sys.exit(main())
