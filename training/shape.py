"""The shape of the network, and the schedule of its training."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama, or with biases a Qwen2: transformers' two names for one network."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 704
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    native_len: int = 256  # input tokens of a window

    def __post_init__(self) -> None:
        if self.qkv_bias and self.heads * self.head_dim != self.hidden:
            raise ValueError("Qwen2 has no head_dim of its own: heads x head_dim must be hidden")


@dataclass(frozen=True)
class Schedule:
    """Steps, learning rates, and the windows of a step. Fractions are relative to `steps`."""

    steps: int = 6000
    polish_steps: int = 0  # after `steps`, mostly on needles
    windows_per_step: int = 16
    seed: int = 0
    planted: bool = False  # start with an induction circuit (`induction.py`)
    warmup_steps: int = 40
    cooldown: float = 0.5  # the last part, in which the learning rate falls linearly
    last_rate: float = 0.02  # relative to the full learning rate, at the end
    matrix_rate: float = 0.02  # full learning rate of Muon
    matrix_decay: float = 0.1  # weight decay of Muon
    other_rate: float = 4e-3  # full learning rate of AdamW: embedding, norms, biases
    late_from: float = 0.6  # start of the late mix
    polish_rate: float = 0.25  # relative to the full learning rate, at the first polishing step

    @property
    def all_steps(self) -> int:
        return self.steps + self.polish_steps

    def rate(self, step: int) -> float:
        """Return the learning rate of step 0, 1, ... relative to the full one."""
        if step >= self.steps:
            left = 1 - (step - self.steps) / self.polish_steps
            return max(self.last_rate, self.polish_rate * left)
        left = 1 - step / self.steps
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return warm * min(1.0, max(self.last_rate, left / self.cooldown))
