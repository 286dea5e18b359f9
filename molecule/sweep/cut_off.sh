#!/usr/bin/env bash
# Sweep two rows and cut all ssh connections while the first is tried: `cut_off.sh PROJECT HOST RESULTS`.
set -euo pipefail
project=$1 host=$2 results=$3
dropin=/run/systemd/system/sglang-ddtree.service.d/90-sweep.conf
cd "$project"
ansible-playbook -i molecule/inventory sweep.yml -e sweep_results_dir="$results" -e sweep_study=cut -e sweep_arms=ar \
    -e grid=8:4 -e sweep_prompt_limit=2 -e sweep_tokens=32 &
sweep=$!
trap 'kill "$sweep" 2>/dev/null || true' EXIT
# A connection that is cut between two tasks is made anew, and nobody notices: wait for the one that runs the
# readiness module, which the client's Python does.
for _ in $(seq 240); do
    if testhosts/testhosts exec "$host" -- \
        sh -c "test -e $dropin && pgrep -f '^/opt/sglang/client/current/bin/python'" >/dev/null 2>&1; then
        sleep 1
        testhosts/testhosts exec "$host" -- pkill -f 'sshd: root' || true
        break
    fi
    sleep 0.25
done
wait "$sweep"
trap - EXIT
