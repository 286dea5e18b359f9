#!/usr/bin/env bash
# Makes every hash-locked list anew from its .in file. Needs uv: the one resolver that locks for several Pythons.
#   tools/lock.sh            usually as `make lock`
set -euo pipefail
cd "$(dirname "$0")/.."
command -v uv >/dev/null || { echo "lock: found no uv, expected it on PATH: pip install uv" >&2; exit 1; }

lock() { # IN OUT OPTIONS...
    local in=$1 out=$2; shift 2
    uv pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-header "$@" "$in" -o "$out"
}
engine=(--python-platform x86_64-manylinux_2_35 --no-annotate)

lock requirements/controller.in requirements/controller.txt --universal
lock requirements/dev.in requirements/dev.txt --universal
lock requirements/engine-test.in requirements/engine-test.txt --universal
lock requirements/client.in roles/sweep_client/files/requirements.txt --universal
lock requirements/engine-cuda.in roles/sglang_engine/files/requirements-cuda.txt "${engine[@]}" --prerelease=allow

# The CPU build of torch carries a local suffix that a lock file must not name; its hash is added by hand.
cpu=roles/sglang_engine/files/requirements-cpu.txt
torch_cpu=$(grep -A1 '^torch==' "$cpu" | tail -1)
lock requirements/engine-cpu.in "$cpu" --no-deps "${engine[@]}"
grep -qF "$torch_cpu" "$cpu" || sed -i "s|^torch==.*|&\n$torch_cpu|" "$cpu"
