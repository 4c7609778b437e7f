"""Muon for matrices, AdamW for the other parameters.

Muon (Keller Jordan and others, 2024) takes the momentum of a matrix's gradient. Five iterations of
Newton-Schulz bring it close to the nearest orthogonal matrix, which is the update. A network of
this size then needs about half the tokens that it needs with AdamW alone. This number is from the
literature and was not measured here.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from training.shape import Schedule

_ITERATIONS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steep at 0; singular values come near 1, not to 1
_MOMENTUM = 0.95


class Optimizer:
    """Muon and AdamW, with their state under the parameters' names, so that it can be stored."""

    def __init__(self, network: nn.Module, schedule: Schedule) -> None:
        self._schedule = schedule
        named = dict(network.named_parameters())
        self._matrices = {
            name: each for name, each in named.items() if each.dim() == 2 and "embed" not in name
        }
        self._others = {name: each for name, each in named.items() if name not in self._matrices}
        self._momenta = {name: torch.zeros_like(each) for name, each in self._matrices.items()}
        self._adamw = torch.optim.AdamW(
            self._others.values(),
            lr=schedule.other_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        )

    def step(self, rate: float) -> None:
        """Take one step at `rate` times the full learning rates, and clear the gradients."""
        self._step_matrices(rate)
        for group in self._adamw.param_groups:
            group["lr"] = self._schedule.other_rate * rate
        self._adamw.step()
        for parameter in (*self._matrices.values(), *self._others.values()):
            parameter.grad = None

    @torch.no_grad()
    def _step_matrices(self, rate: float) -> None:
        matrix_rate = self._schedule.matrix_rate * rate
        for name, matrix in self._matrices.items():
            assert matrix.grad is not None
            momentum = self._momenta[name]
            momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
            direction = orthogonal(matrix.grad.lerp(momentum, _MOMENTUM))
            rows, columns = matrix.shape
            matrix.mul_(1 - matrix_rate * self._schedule.matrix_decay)
            matrix.add_(direction, alpha=-matrix_rate * max(1.0, rows / columns) ** 0.5)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that the next step depends on, by name."""
        tensors = {f"momentum.{name}": each for name, each in self._momenta.items()}
        for name, parameter in self._others.items():
            for key, value in self._adamw.state.get(parameter, {}).items():
                tensors[f"adamw.{key}.{name}"] = value
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load the tensors that `state` returned."""
        for name, momentum in self._momenta.items():
            momentum.copy_(tensors[f"momentum.{name}"])
        for name, parameter in self._others.items():
            self._adamw.state[parameter] = {
                key: tensors[f"adamw.{key}.{name}"].clone() for key in _adamw_keys(tensors)
            }


@torch.no_grad()
def orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrix with all singular values brought to about 1 (between 0.7 and 1.2)."""
    a, b, c = _COEFFICIENTS
    x: Tensor = matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.T if is_tall else x).float()


def _adamw_keys(tensors: Iterable[str]) -> set[str]:
    return {name.split(".")[1] for name in tensors if name.startswith("adamw.")}
