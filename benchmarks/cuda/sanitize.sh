#!/usr/bin/env bash
# The CUDA platform's kernels under NVIDIA's compute-sanitizer, on small inputs: memcheck (accesses beyond what was
# allocated, misaligned ones), then racecheck (shared memory written and read without a barrier between). Needs a device.
#
#     benchmarks/cuda/sanitize.sh [SECONDS]       # for each tool; 75 unless given
#
# Exits with 1 when a tool finds something, when the kernels fail, and when the time does not suffice for all of them.
set -uo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-75}
python=${PYTHON:-python3}
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer 2>/dev/null | head -n 1)
[ -n "$tool" ] || {
  echo "no compute-sanitizer here: it comes with the CUDA toolkit (package cuda-sanitizer); put it on PATH" >&2
  exit 2
}
run=("$python" -m tests.platforms.cuda.small)
# every tensor has an allocation of its own: in torch's pools an access beyond one is within another
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

echo "== without a tool: compiles what is not compiled yet"
timeout -k 10 300 "${run[@]}" --seconds 240 || exit 1
code=0
for what in memcheck racecheck; do
  echo "== $what"
  options=(--tool "$what" --error-exitcode 1 --target-processes application-only --print-limit 20)
  [ "$what" = memcheck ] && options+=(--padding 256)  # so that allocations do not touch
  timeout -k 10 $((seconds + 60)) "$tool" "${options[@]}" "${run[@]}" --seconds "$seconds" || code=1
done
[ $code -eq 0 ] && echo "clean" || echo "NOT clean"
exit $code
