"""What is trained: the shape of the network, and how long and how fast it learns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Llama, or with biases a Qwen2: transformers' two names for one network."""

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
    native_len: int = 256  # tokens in a window

    def __post_init__(self) -> None:
        if self.qkv_bias and self.heads * self.head_dim != self.hidden:
            raise ValueError("Qwen2 has no head_dim of its own: heads x head_dim must be hidden")


@dataclass(frozen=True)
class Schedule:
    """Steps, rates, and what a step reads. Fractions are of `steps`."""

    steps: int = 6000
    polish_steps: int = 0  # behind them, on mostly needles
    windows_per_step: int = 16
    seed: int = 0
    planted: bool = False  # start from an induction circuit: `induction.py`
    warmup_steps: int = 40
    cooldown: float = 0.5  # the last part, in which the rate falls linearly
    last_rate: float = 0.02  # of the full one, at the end
    matrix_rate: float = 0.02  # Muon
    matrix_decay: float = 0.1
    other_rate: float = 4e-3  # AdamW: embedding, norms, biases
    late_from: float = 0.6  # the late mix begins
    polish_rate: float = 0.25  # of the full one, at the first polishing step

    @property
    def all_steps(self) -> int:
        """Polishing included."""
        return self.steps + self.polish_steps

    def rate(self, step: int) -> float:
        """The rate of step 0, 1, ... as a share of the full one."""
        if step >= self.steps:
            left = 1 - (step - self.steps) / self.polish_steps
            return max(self.last_rate, self.polish_rate * left)
        left = 1 - step / self.steps
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return warm * min(1.0, max(self.last_rate, left / self.cooldown))
