#!/usr/bin/env bash
# What only a GPU can show, as one run: graphs say what eager says and what plain decoding says, and how fast each is.
#
#   tools/gpu_check.sh PYTHON [TARGET DRAFT]   PYTHON: of an environment with SGLang for CUDA, this backend and requests;
#                                              TARGET, DRAFT: models (default: the demo pair)
#   tools/gpu_check.sh --cpu PYTHON            the parts that a CPU can run
set -euo pipefail
cd "$(dirname "$0")/.."
exec "$([[ $1 == --cpu ]] && echo "$2" || echo "$1")" tools/gpu_check.py "$@"
