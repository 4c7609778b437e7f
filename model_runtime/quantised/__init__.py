"""Read quantised safetensors checkpoints: their config, their tensors, their dequantised weights.

May import: nothing of ours. tests/test_layout.py checks it. Only what computes imports torch.
"""
