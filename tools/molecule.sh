#!/usr/bin/env bash
# Runs molecule scenarios one after the other on one test host, and prints a closing line.
# The host's disk lives on from one scenario to the next (the second deploys in seconds); nothing outlives the run.
#
#   tools/molecule.sh SCENARIO...
set -euo pipefail
cd "$(dirname "$0")/.."

testhosts/testhosts deps
MOL_WHEELHOUSE=$(tools/wheelhouse.sh --python 3.11 roles/sglang_engine/files/requirements-cpu.txt \
    roles/sweep_client/files/requirements.txt requirements/engine-test.txt)
export MOL_WHEELHOUSE
trap 'testhosts/testhosts down mol1' EXIT

passed=0
for scenario in "$@"; do
    molecule test --scenario-name "$scenario"
    passed=$((passed + 1))
done
echo "molecule: $passed passed, $(($# - passed)) failed"
