# Sourced by the runs beside it. gpu.md says what each of them measures.
#
# OUT: the folder that comes back: log.txt, and results.tar.gz of all that the lines wrote.
# COMMIT: what is measured; told in every record.
# TINY=1: sizes for a machine without a GPU, with Triton's interpreter. Tests that need CUDA skip
# themselves. The numbers mean nothing; it shows that every line runs.
OUT=${OUT:-build/gpu_runs}
COMMIT=${COMMIT:-unknown}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
RESULTS=$(mktemp -d)
SITE=
trap 'rm -rf "$RESULTS" "$SITE"' EXIT # $OUT has all of it
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
if ls .whl/*.whl >/dev/null 2>&1; then
    SITE=$(mktemp -d)
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$SITE" \
        .whl/*.whl || exit
    export PYTHONPATH=$SITE:$PWD
else
    export PYTHONPATH=$PWD
fi
if [ -n "${TINY:-}" ]; then
    export TRITON_INTERPRET=1
    SLOWER=5 # such a machine may be busy
    SIZES=(--tiny)
    PARALLEL=()
    KERNEL_CASES=(-k are_written_to)
else
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton}
    SLOWER=1
    SIZES=()
    PARALLEL=(-n 12 --dist load)
    KERNEL_CASES=()
fi
TEST=("$PYTHON" -m pytest -q -W default -o addopts=--import-mode=importlib -p no:cacheprovider)

# say NAME SECONDS COMMAND...: run a line in a process and a file of its own, within its time.
# A line that fails or hangs costs its own results only. Output goes through a file, because a
# process that is left behind would keep a pipe open.
say() {
    local name=$1 limit=$(($2 * SLOWER)) began=$SECONDS code=0
    shift 2
    timeout -k 5 "$limit" "$@" >"$RESULTS/$name.txt" 2>&1 </dev/null || code=$?
    echo "== $name: code $code, $((SECONDS - began)) s of $limit" | tee -a "$OUT/log.txt"
    tail -c 300000 "$RESULTS/$name.txt" >>"$OUT/log.txt"
    tail -n 20 "$RESULTS/$name.txt" | cut -c 1-300
    # Anew after each line, because the machine may take the whole run away.
    tar -C "$RESULTS" -czf "$OUT/.results" . && mv "$OUT/.results" "$OUT/results.tar.gz"
}
