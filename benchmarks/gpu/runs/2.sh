# The latency that users see: 600 s at most, 560 s expected.
. benchmarks/gpu/runs/env.sh
say prefill 110 "$PYTHON" -m benchmarks.gpu.model "${SIZES[@]}" --commit "$COMMIT" \
    --parts prefill --seconds 80 --out "$RESULTS/prefill"
say served 150 "$PYTHON" -m benchmarks.gpu.model "${SIZES[@]}" --commit "$COMMIT" \
    --parts bursts,arrivals,sampling,queued,profile --seconds 120 --out "$RESULTS/served"
say growth 80 "$PYTHON" -m benchmarks.gpu.model "${SIZES[@]}" --commit "$COMMIT" \
    --parts growth,windows --seconds 60 --out "$RESULTS/growth"
say drafts 60 "$PYTHON" -m benchmarks.gpu.model "${SIZES[@]}" --commit "$COMMIT" \
    --parts drafts --seconds 40 --out "$RESULTS/drafts"
say positions 50 "$PYTHON" -m benchmarks.gpu.attention "${SIZES[@]}" --commit "$COMMIT" \
    --parts positions --record "$RESULTS/positions.jsonl"
say hard 70 "${TEST[@]}" tests/gpu -k "long_contexts or 32_bits or no_mask or million or recorded_steps"
say few_bits 80 "$PYTHON" -m benchmarks.gpu.model "${SIZES[@]}" --commit "$COMMIT" \
    --parts few_bits --seconds 60 --out "$RESULTS/few_bits"
