#!/bin/sh
# Everything that only a machine with a GPU can tell, in parts of at most nine minutes:
#   sh benchmarks/on_a_gpu.sh FOLDER [VLLM_ENVIRONMENT]
# Each part writes its log, and figures as JSON, into FOLDER; a part that fails does not stop the others.
out=${1:?"usage: sh benchmarks/on_a_gpu.sh FOLDER [VLLM_ENVIRONMENT]"}
mkdir -p "$out"
failed=0
part() {
    name=$1
    shift
    echo "$name: $*"
    timeout 540 "$@" > "$out/$name.json" 2> "$out/$name.log" || { failed=1; echo "$name failed: $out/$name.log"; }
}
part tests python -m pytest -q tests/gpu
part kernels baton bench kernels --device cuda --json
part engine baton bench gpu --no-servers --folder "$out" --json
part servers baton bench gpu --no-engine --folder "$out" ${2:+--peer "vllm=$2"} --json
exit $failed
