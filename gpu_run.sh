timeout 120 python3 -m pytest -q -x -p no:cacheprovider tests/backends/test_cuda_attention.py -m gpu -k "tiles_ran or infinite or every_width" 2>&1 | tail -15
timeout 170 python3 -m benchmarks.gpu_dot_attention 2>&1 | grep -v Warning
cp benchmarks/results/gpu_dot_attention.csv $OUT/
