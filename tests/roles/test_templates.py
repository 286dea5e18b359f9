"""The unit and its environment as Ansible renders them, with the roles' own defaults and ansible.cfg."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.roles.rolekit import ROOT

MODELS = {"sglang_model_path": "/srv/models/target", "sglang_draft_model_path": "/srv/models/draft"}
HOSTS: dict[str, dict[str, Any]] = {
    "cpu": MODELS | {"sglang_accelerator": "cpu"},
    "text": MODELS
    | {
        "sglang_accelerator": "cpu",
        "sglang_budget": "24",
        "sglang_topk": "6",
        "sglang_block_size": "8",
        "sglang_port": "31000",
        "sglang_environment": {"A": 'x "$y" 50%', "SGLANG_USE_CPU_ENGINE": "0"},
        "sglang_engine_args": {"dtype": "bfloat16", "disable-cuda-graph": False},
    },
    "cuda": {
        "sglang_model_path": "/srv/m o d",
        "sglang_arm": "ar",
        "sglang_service_name": "other",
        "sglang_user": "engine",
        "sglang_stop_timeout": 30,
        "sglang_engine_args": {
            "tp-size": 8,
            "mem-fraction-static": 0.85,
            "page-size": 0,
            "model-loader-extra-config": {"enable_multithread_load": True, "num_threads": 16},
            "chat-template": "50%$HOME",
        },
    },
    "promoted": MODELS
    | {
        "sglang_accelerator": "cpu",
        "__sglang_promotion": {
            "configuration": {"arm": "tree", "budget": 48, "topk": 8, "extra": {"page-size": 1}},
            "study": "s1",
        },
    },
}
PLAY = [
    {
        "hosts": "all",
        "gather_facts": False,
        "tasks": [
            {
                "ansible.builtin.import_role": {"name": "sglang_service", "tasks_from": "settings"},
            },
            {
                "ansible.builtin.copy": {
                    "dest": "{{ rendered }}/{{ inventory_hostname }}.json",
                    "mode": "0600",
                    "content": "{{ {'unit': lookup('ansible.builtin.template', __sglang_unit_template), "
                    "'environment': lookup('ansible.builtin.template', __sglang_environment_template), "
                    "'digest': __sglang_digest, 'again': __sglang_digest, 'argv': __sglang_argv, "
                    "'url': __sglang_base_url} | to_json }}",
                }
            },
        ],
    }
]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each host gets."""
    folder = tmp_path_factory.mktemp("rendered")
    shared = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "rendered": str(folder),
        "role_path": str(ROOT / "roles" / "sglang_service"),  # as inside the role
        "__sglang_service_release": "0123456789ab",
    }
    inventory = folder / "hosts.yml"
    inventory.write_text(
        yaml.safe_dump({"all": {"hosts": {n: shared | v for n, v in HOSTS.items()}}}, sort_keys=False)
    )
    play = folder / "play.yml"
    play.write_text(yaml.safe_dump(PLAY))
    program = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [str(program), "-i", str(inventory), str(play)],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_STDOUT_CALLBACK": "default"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in HOSTS}


def values(text: str) -> dict[str, str]:
    """The assignments of a unit or an environment file."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {pair[0]: pair[1] for pair in pairs}


def test_the_unit_has_the_whole_command_on_one_line(rendered: dict[str, dict[str, Any]]) -> None:
    assert values(rendered["cpu"]["unit"])["ExecStart"] == (
        "/opt/sglang/current/bin/python -m sglang.launch_server --model-path /srv/models/target "
        "--host 127.0.0.1 --port 30000 --device cpu --dtype float32 --attention-backend torch_native "
        "--sampling-backend pytorch --grammar-backend none --disable-cuda-graph "
        "--speculative-algorithm DDTREE --speculative-draft-model-path /srv/models/draft "
        "--speculative-ddtree-budget 16 --speculative-ddtree-topk-cap 4"
    )


def test_text_values_and_overrides(rendered: dict[str, dict[str, Any]]) -> None:
    assert values(rendered["text"]["unit"])["ExecStart"] == (
        "/opt/sglang/current/bin/python -m sglang.launch_server --model-path /srv/models/target "
        "--host 127.0.0.1 --port 31000 --device cpu --dtype bfloat16 --attention-backend torch_native "
        "--sampling-backend pytorch --grammar-backend none "
        "--speculative-algorithm DDTREE --speculative-draft-model-path /srv/models/draft "
        "--speculative-dflash-block-size 8 "
        "--speculative-ddtree-budget 24 --speculative-ddtree-topk-cap 6"
    )
    assert rendered["text"]["url"] == "http://127.0.0.1:31000"
    assert values(rendered["text"]["environment"]) == {
        "A": '"x \\"\\$y\\" 50%"',
        "SGLANG_USE_CPU_ENGINE": '"0"',
    }


def test_what_systemd_would_expand_is_escaped_and_zero_survives(rendered: dict[str, dict[str, Any]]) -> None:
    assert values(rendered["cuda"]["unit"])["ExecStart"] == (
        '/opt/sglang/current/bin/python -m sglang.launch_server --model-path "/srv/m o d" '
        "--host 127.0.0.1 --port 30000 --tp-size 8 --mem-fraction-static 0.85 --page-size 0 "
        '--model-loader-extra-config "{\\"enable_multithread_load\\":true,\\"num_threads\\":16}" '
        '--chat-template "50%%$$HOME"'
    )
    assert "50%$HOME" in rendered["cuda"]["argv"]


def test_names_and_times_come_from_the_variables(rendered: dict[str, dict[str, Any]]) -> None:
    unit = values(rendered["cuda"]["unit"])
    assert unit["User"] == "engine"
    assert unit["StateDirectory"] == "other"
    assert unit["EnvironmentFile"] == "/etc/sglang/other.env"
    assert unit["TimeoutStopSec"] == "30s"
    assert unit["TimeoutStartSec"] == "900s"


def test_the_accelerator_decides_about_devices(rendered: dict[str, dict[str, Any]]) -> None:
    cpu, cuda = (values(rendered[name]["unit"]) for name in ("cpu", "cuda"))
    assert cpu["PrivateDevices"] == "yes"
    assert "PrivateDevices" not in cuda
    assert "ExecStartPre" not in cpu
    assert cuda["ExecStartPre"] == "-+/usr/bin/nvidia-modprobe -u -c 0"


def test_the_unit_is_hardened_and_restarts_with_a_limit(rendered: dict[str, dict[str, Any]]) -> None:
    for name in HOSTS:
        unit = values(rendered[name]["unit"])
        expected = {
            "Type": "exec",
            "KillMode": "mixed",
            "Restart": "on-failure",
            "StartLimitBurst": "5",
            "ProtectSystem": "strict",
            "PrivateTmp": "yes",
            "NoNewPrivileges": "yes",
            "CapabilityBoundingSet": "",
            "LimitMEMLOCK": "infinity",
        }
        assert {key: unit.get(key) for key in expected} == expected


def test_the_files_say_who_manages_them_and_nothing_that_changes(rendered: dict[str, dict[str, Any]]) -> None:
    for found in rendered.values():
        for text in (found["unit"], found["environment"]):
            assert "Ansible managed" in text.splitlines()[1]
        assert found["digest"] == found["again"]
    assert len({found["digest"] for found in rendered.values()}) == len(HOSTS)


def test_a_promotion_is_what_the_unit_runs(rendered: dict[str, dict[str, Any]]) -> None:
    command = values(rendered["promoted"]["unit"])["ExecStart"]
    assert command.endswith("--speculative-ddtree-budget 48 --speculative-ddtree-topk-cap 8 --page-size 1")
