#!/usr/bin/env bash
# Makes every hash-locked list anew from its .in file. Needs uv: the one resolver that locks for several Pythons.
#   tools/lock.sh            usually as `make lock`
set -euo pipefail
cd "$(dirname "$0")/.."
command -v uv >/dev/null || { echo "lock: found no uv, expected it on PATH: pip install uv" >&2; exit 1; }

lock() { # IN OUT OPTIONS...: the comment at the head of OUT stays
    local in=$1 out=$2 head; shift 2
    head=$(sed -n '/^#/!q;p' "$out")
    uv pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-header "$@" "$in" -o "$out"
    [[ -z $head ]] || { printf '%s\n' "$head"; cat "$out"; } >"$out.new"
    [[ -z $head ]] || mv "$out.new" "$out"
}
engine=(--python-platform x86_64-manylinux_2_35 --no-annotate)

lock requirements/controller.in requirements/controller.txt --universal
lock requirements/dev.in requirements/dev.txt --universal
lock requirements/engine-test.in requirements/engine-test.txt --universal
lock requirements/client.in roles/sweep_client/files/requirements.txt --universal
for older in requirements/engine-[0-9]*.in; do
    lock "$older" "${older%.in}.txt" --no-deps "${engine[@]}"
done
lock requirements/engine-cuda.in roles/sglang_engine/files/requirements-cuda.txt "${engine[@]}" --prerelease=allow

# torch: only the hash of its CPU build, which carries a local suffix that a lock file must not name.
cpu=roles/sglang_engine/files/requirements-cpu.txt
torch=$(sed -n '/^torch==/{p;n;p;q}' "$cpu")
lock requirements/engine-cpu.in "$cpu" --no-deps "${engine[@]}"
TORCH=$torch perl -0pi -e 's/^torch==.*\n(    --hash.*\n)+/$ENV{TORCH}\n/m' "$cpu"
echo "lock: torch keeps the hash it had; after a change of its version put the CPU build's hash into $cpu"
