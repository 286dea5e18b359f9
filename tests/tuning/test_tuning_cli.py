"""The command: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tuning.facts import AR, fact, measurement, tree
from tests.tuning.standin import Host, Service, metrics_line
from tuning.cli import main
from tuning.models import Measurement
from tuning.store import Study


@pytest.fixture
def results(tmp_path: Path) -> Path:
    study = Study(tmp_path / "results" / "s1").create()
    study.append(fact(AR, "01", measurement=measurement(50.0)))
    study.append(fact(tree(8, 4), "02", measurement=measurement(100.0)))
    study.link_latest()
    return study.path.parent


def test_grid_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid", "8:4, 16:4", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [(one["arm"], one["budget"], one["topk"]) for one in made] == [
        ("ar", None, None),
        ("chain", None, None),
        ("tree", 8, 4),
        ("tree", 16, 4),
    ]


def test_grid_lines_and_arms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid", "seed", "--arms", "ar"]) == 0
    labels = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert labels == ["ar", "8:4", "16:4", "16:8", "24:6", "32:8", "48:8"]


@pytest.mark.parametrize("spec", ["8:", "0:4", "8:four", "nope", ""])
def test_bad_grid_is_one_line_and_status_2(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid", spec, "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("arborist: ")
    assert said.err.count("\n") == 1


def test_report_formats(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["report", "--results", str(results)]
    assert main(given) == 0
    assert "best: 8:4" in capsys.readouterr().out
    assert main([*given, "s1", "--format", "markdown"]) == 0
    assert "| 8:4 | ok | 100.0 |" in capsys.readouterr().out
    assert main([*given, "latest", "--format", "csv"]) == 0
    assert capsys.readouterr().out.count("\n") == 3
    assert main(["report", str(results / "s1"), "--format", "json"]) == 0
    assert [one["configuration"]["label"] for one in json.loads(capsys.readouterr().out)] == ["ar", "8:4"]


def test_report_writes(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--results", str(results), "--write"]) == 0
    assert (results / "s1" / "report.md").is_file()
    assert "wrote" in capsys.readouterr().err


def test_report_of_no_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--results", str(tmp_path)]) == 2
    assert "no study 'latest'" in capsys.readouterr().err


def test_report_tells_of_torn_lines(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (results / "s1" / "trials.jsonl").open("ab") as file:
        file.write(b'{"sch')
    assert main(["report", "--results", str(results)]) == 0
    assert "torn by a crash" in capsys.readouterr().err


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["title"] == "TrialFact"
    assert "invocation_id" in schema["properties"]


def test_bench(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["bench", "--url", service.url, "--limit", "4", "--tokens", "10", "--levels", "1,2"]
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "concurrency 2:" in said
    assert "accept length by responses: 3.000 = 72 / 24 steps" in said
    assert main([*given, "--json"]) == 0
    assert Measurement.model_validate_json(capsys.readouterr().out).levels[0].concurrency == 2


def test_bench_takes_the_key_from_the_environment(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "k1")
    assert main(["bench", "--url", service.url, "--limit", "1", "--tokens", "4"]) == 0
    assert service.authorizations == {"Bearer k1"}
    assert "k1" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "arborist: request_failed"),
        (["--prompts", "nope.json"], 2, "check sweep_prompts"),
        (["--levels", "0"], 2, "sweep_levels"),
    ],
)
def test_bench_errors(words: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == status
    assert said in capsys.readouterr().err


def test_journal(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.log(metrics_line([1, 2, 3]), metrics_line([8]))
    assert main(["journal", "x.service"]) == 0
    said = capsys.readouterr().out
    assert "accept length 3.500 = 14 tokens / 4 steps, from journal-metrics" in said
    assert "1,1,1,0,0,0,0,1" in said
    assert main(["journal", "x.service", "--after-cursor", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["acceptance"]["tau"] == 8.0
    assert len(shown["metrics"]) == 1


def test_journal_of_another_start_needs_all(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.log(metrics_line([4]), invocation="f" * 32)
    assert main(["journal", "x.service"]) == 0
    assert "no metrics line" in capsys.readouterr().out
    assert main(["journal", "x.service", "--all"]) == 0
    assert "accept length 4.000" in capsys.readouterr().out


def test_journal_of_an_unknown_unit(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.unit(LoadState="not-found")
    assert main(["journal", "x.service"]) == 1
    assert "not-found" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["grid", "report", "bench", "journal", "schema"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "usage: arborist" in capsys.readouterr().out


def test_as_a_module_without_ansible_or_rich() -> None:
    """The measured host has neither: the package must not need them until a table is drawn."""
    block = "import sys; sys.modules['rich'] = sys.modules['ansible'] = sys.modules['numpy'] = None; "
    root = Path(__file__).resolve().parents[2]
    names = sorted(path.stem for path in (root / "tuning").glob("*.py") if not path.stem.startswith("__"))
    code = block + "".join(f"import tuning.{name}; " for name in names)
    code += "from tuning.cli import main; sys.exit(main(['grid', 'quick', '--json']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 4


def test_a_closed_pipe_is_no_error() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        f"set -o pipefail; {sys.executable} -m tuning schema | head -c 10",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
