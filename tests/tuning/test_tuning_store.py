"""The study on disk: nothing finished is lost, nothing is read silently wrong."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from stat import S_ISDIR

import pytest

from tests.tuning.facts import fact, tree
from tuning.models import TrialFact
from tuning.store import ConcurrentWriter, StoreError, Study, open_study


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path / "results" / "s1").create()


def test_append_keeps_order_and_writes_the_facts_file(study: Study) -> None:
    facts = [fact(trial="01"), fact(tree(8, 4), trial="02"), fact(tree(8, 4), trial="02", host="h2")]
    paths = [study.append(one) for one in facts]
    assert study.facts() == facts
    assert paths[2] == study.path / "facts" / "h2" / "02.json"
    assert TrialFact.model_validate_json(paths[1].read_text()) == facts[1]
    assert len(study.trials.read_text().splitlines()) == 3


def test_append_syncs_the_line_and_the_folders(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def spy(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        if synced[-1] == str(study.trials):  # the line must be in the file by now
            assert study.trials.read_bytes().endswith(b"\n")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    study.append(fact())
    assert str(study.trials) in synced
    order = {name: place for place, name in enumerate(synced)}
    assert order[str(study.path)] > order[str(study.trials)]  # the new file's name
    assert str(study.path / "facts" / "h1") in synced
    assert any(name.startswith(str(study.path / "facts" / "h1" / ".")) for name in synced)
    assert any(S_ISDIR(Path(name).stat().st_mode) for name in synced if Path(name).exists())


def test_torn_last_line_at_every_byte(study: Study) -> None:
    study.append(fact(trial="01"))
    study.append(fact(trial="02"))
    whole = study.trials.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first + 1, len(whole) - 1, 97):
        study.trials.write_bytes(whole[:cut])
        contents = study.read()
        assert [one.trial for one in contents.facts] == ["01"]
        assert len(contents.problems) == 1
        assert "line 2" in contents.problems[0]
        assert "torn" in contents.problems[0]


def test_append_after_a_torn_line_loses_neither(study: Study) -> None:
    study.append(fact(trial="01"))
    with study.trials.open("ab") as file:
        file.write(b'{"schema_version":1,"study":"s1\xc3')
    study.append(fact(trial="02"))
    study.append(fact(trial="03"))
    contents = study.read()
    assert [one.trial for one in contents.facts] == ["01", "02", "03"]
    assert len(contents.problems) == 1


def test_foreign_line_is_reported(study: Study) -> None:
    study.append(fact())
    with study.trials.open("ab") as file:
        file.write(b'{"schema_version": 9}\n')
    contents = study.read()
    assert len(contents.facts) == 1
    assert "line 2" in contents.problems[0]
    assert "not a trial fact this version knows" in contents.problems[0]


def test_a_killed_writer_leaves_only_whole_lines_or_one_torn(study: Study) -> None:
    script = textwrap.dedent(
        """
        import sys
        from tests.tuning.facts import fact
        from tuning.store import Study
        study = Study(sys.argv[1])
        for number in range(10000):
            study.append(fact(trial=f"{number:05d}"))
            print(number, flush=True)
        """
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script, str(study.path)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if line.strip() == "5":
                break
        writer.kill()
        told = [line.strip() for line in writer.stdout if line.strip()]
    last = int(told[-1]) if told else 5
    contents = study.read()
    # what append returned for is there; at most one more was under way
    assert [one.trial for one in contents.facts][: last + 1] == [f"{n:05d}" for n in range(last + 1)]
    assert len(contents.facts) + len(contents.problems) <= last + 2


def test_same_trial_twice_is_refused(study: Study) -> None:
    study.append(fact())
    with pytest.raises(StoreError, match="already has trial 01 of host h1"):
        study.append(fact())
    assert len(study.facts()) == 1


def test_fact_of_another_study_is_refused(study: Study) -> None:
    with pytest.raises(StoreError, match="belongs to study 's2'"):
        study.append(fact(study="s2"))
    assert not study.trials.exists()


def test_a_second_writer_is_refused(study: Study) -> None:
    study.append(fact(trial="01"))
    with study.trials.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConcurrentWriter, match="being written by another process"):
            study.append(fact(trial="02"), lock_timeout_s=0.0)
    study.append(fact(trial="02"), lock_timeout_s=0.0)
    assert len(study.facts()) == 2


def test_hold_is_exclusive_and_ends(study: Study) -> None:
    with study.hold():
        with pytest.raises(ConcurrentWriter), Study(study.path).hold():
            pass
        study.append(fact())  # the holder itself writes
    with Study(study.path).hold():
        pass


def test_latest_follows_and_is_replaced(study: Study) -> None:
    study.link_latest()
    study.append(fact())
    assert open_study(study.path.parent).name == "s1"
    second = Study(study.path.parent / "s2").create()
    second.link_latest()
    assert open_study(study.path.parent).name == "s2"
    assert sorted(path.name for path in study.path.parent.iterdir()) == ["latest", "s1", "s2"]
    # a study opened through the link knows its own name
    second.append(fact(study="s2"))
    assert open_study(study.path.parent, "latest").facts()[0].study == "s2"


def test_latest_that_is_no_link_is_left_alone(study: Study) -> None:
    (study.path.parent / "latest").mkdir()
    with pytest.raises(StoreError, match="isn't a link"):
        study.link_latest()


@pytest.mark.parametrize("name", ["latest", ".hidden", "a b", "-x"])
def test_bad_study_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError):
        Study(tmp_path / name).create()


def test_open_study_says_what_is_there(study: Study) -> None:
    with pytest.raises(StoreError, match=r"no study 'nope' in .*; found: s1"):
        open_study(study.path.parent, "nope")
    with pytest.raises(StoreError, match="found: none"):
        open_study(study.path.parent / "elsewhere")
    with pytest.raises(StoreError, match="study: "):
        open_study(study.path.parent, "../results")


def test_meta(study: Study) -> None:
    assert study.meta() == {}
    study.write_meta({"grid": ["8:4"], "hosts": ["h1"]})
    assert study.meta() == {"grid": ["8:4"], "hosts": ["h1"]}
    (study.path / "study.json").write_text("{")
    with pytest.raises(StoreError, match="isn't JSON"):
        study.meta()


def test_failed_write_leaves_the_old_file_and_no_litter(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    study.write_meta({"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        study.write_meta({"a": 2})
    assert study.meta() == {"a": 1}
    assert [path.name for path in study.path.iterdir()] == ["study.json"]
