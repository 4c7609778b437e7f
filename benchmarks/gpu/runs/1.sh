# Is it right, and the first numbers of our own: 600 s at most, 515 s expected.
. benchmarks/gpu/runs/env.sh
say needs 50 "$PYTHON" -m benchmarks.gpu.needs
say engine 100 "${TEST[@]}" tests/gpu -k "self_check or fewer_kernels or decodes_are_recorded"
say attention 120 "$PYTHON" -m benchmarks.gpu.attention "${SIZES[@]}" --commit "$COMMIT" \
    --record "$RESULTS/attention.jsonl"
say steps 130 "$PYTHON" -m benchmarks.gpu.model "${SIZES[@]}" --commit "$COMMIT" \
    --parts decode --seconds 90 --out "$RESULTS/steps"
say kernels 120 "${TEST[@]}" "${PARALLEL[@]}" "${KERNEL_CASES[@]}" \
    --junitxml "$RESULTS/kernels.xml" tests/model_runtime/attention/test_triton_backend.py \
    tests/model_runtime/attention/test_triton_ranges.py
say layers 60 "${TEST[@]}" "${PARALLEL[@]}" -k "gate_is or norm_are or heads" \
    --junitxml "$RESULTS/layers.xml" tests/model_runtime/gpu/test_fewer_kernels.py
