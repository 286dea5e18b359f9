#!/usr/bin/env bash
# Makes a wheelhouse (a folder of wheels, every one checked against a hash) outside the tree, once, and prints
# its path: what hosts without a way out, and every later run on this machine, install from.
#
#   tools/wheelhouse.sh [--python X.Y] LOCK...     LOCK: a hash-locked requirements file
#
# --python   the Python of the machine that will install (default: the one running)
# The folder: ${ARBORIST_CACHE:-${XDG_CACHE_HOME:-~/.cache}/arborist}/wheelhouse/<hash of the locks>
set -euo pipefail

usage() { sed -n '2,/^set -e/{/^#/s/^# \{0,1\}//p}' "$0"; }
want=
case ${1-} in
    -h | --help) usage; exit 0 ;;
    --python) want=${2:?--python wants a version such as 3.11}; shift 2 ;;
    -*) echo "$0: unknown option $1; expected --python or --help" >&2; exit 2 ;;
esac
(($#)) || { usage >&2; exit 2; }

python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
want=${want:-$version}

cache=${ARBORIST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/arborist}/wheelhouse
key=$({ echo "$want"; cat "$@"; } | sha256sum | cut -c1-12)
house=$cache/$key
mkdir -p "$cache"

exec 9>"$cache/$key.lock"
flock 9                                            # two runs at once make it once
if [[ ! -d $house ]]; then
    echo "wheelhouse: downloading the wheels of $* for Python $want (once, up to several hundred MB)" >&2
    part=$cache/.$key.part                         # kept after a broken run: pip goes on from what is there
    mkdir -p "$part"
    options=(--no-deps --require-hashes --only-binary=:all: --dest "$part" --disable-pip-version-check -qq)
    if [[ $want != "$version" ]]; then             # for another interpreter pip must be told what it accepts
        options+=(--python-version "$want" --implementation cp --abi "cp${want/./}" --abi abi3 --abi none)
        for minor in $(seq 36 -1 5); do options+=(--platform "manylinux_2_${minor}_x86_64"); done
        options+=(--platform manylinux2014_x86_64 --platform any)
    fi
    for lock in "$@"; do "$python" -m pip download "${options[@]}" -r "$lock" >&2; done
    mv "$part" "$house"
fi
echo "$house"
