#!/usr/bin/env bash
# `make demo`: a real systemd host on this machine, the real SGLang in it, deployed and swept by Ansible.
# Needs root on a Debian-family machine; everything else it brings itself. The host is taken down at the end,
# whatever the end; its disk, the template and the wheels stay in the cache, so that a second run is quick.
#
#   GRID=quick TOKENS=128 make demo   another grid (default: seed), longer answers (default: 64 tokens)
#   FRESH=1 make demo                 measure every row again; otherwise rows that an earlier demo measured with the
#                                     same engine, models, command, environment and measurement are kept, and said to be
set -euo pipefail
cd "$(dirname "$0")/.."

grid=${GRID:-seed}
tokens=${TOKENS:-64}
sweep=(-e "grid=$grid" -e "sweep_tokens=$tokens")
# What measures the rows and what is measured are part of the study's name: rows of an older measurement or of
# other models are not gone on with.
measure=$(cat tuning/*.py tuning/data/* models/demo/*/* | sha256sum | cut -c1-6)
[[ -n ${FRESH-} ]] || sweep+=(-e "sweep_study=demo-$tokens-$measure" -e sweep_resume=true)
host=demo1
address=10.90.0.11
hosts=(testhosts/testhosts)
step() { printf '\n=== [%3d s] %s\n' "$SECONDS" "$*"; }

step "Test host: packages, template; wheels (each once, then cached)"
"${hosts[@]}" deps
tools/wheelhouse.sh --python 3.11 roles/sglang_engine/files/requirements-cpu.txt \
    roles/sweep_client/files/requirements.txt requirements/engine-test.txt >.venv/wheelhouse &
wheels=$!
"${hosts[@]}" template >/dev/null
wait "$wheels"

trap '"${hosts[@]}" down --keep "$host"' EXIT
step "Host $host"
"${hosts[@]}" up "$host=$address" --bind "$(<.venv/wheelhouse):/srv/wheelhouse" --bind "$PWD/models/demo:/srv/models"

step "ansible-playbook -i inventory/demo deploy.yml"
ansible-playbook -i inventory/demo deploy.yml
step "ansible-playbook -i inventory/demo sweep.yml ${sweep[*]}"
ansible-playbook -i inventory/demo sweep.yml "${sweep[@]}"
step "Done. The report: results/latest/report.md (and report.csv, trials.jsonl beside it)"
echo "To play with the host: . .venv/bin/activate; testhosts/testhosts up $host=$address" \
    "--bind $(<.venv/wheelhouse):/srv/wheelhouse --bind $PWD/models/demo:/srv/models"
