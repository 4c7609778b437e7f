# The server, memory, and others beside us last: 550 s at most, 520 s expected.
. benchmarks/gpu/runs/env.sh
say server 210 "$PYTHON" -m benchmarks.gpu.model "${SIZES[@]}" --commit "$COMMIT" \
    --parts server --seconds 200 --out "$RESULTS/server"
say memory 110 "${TEST[@]}" tests/gpu -k "cache_sized or serves_as_on_a_cpu or reference or positions"
say contenders 150 "$PYTHON" -m benchmarks.gpu.model "${SIZES[@]}" --commit "$COMMIT" \
    --parts decode,contenders --seconds 120 --out "$RESULTS/contenders"
say tuning 80 "$PYTHON" -m benchmarks.gpu.attention "${SIZES[@]}" --commit "$COMMIT" \
    --parts tuning --record "$RESULTS/tuning.jsonl"
