"""How attention depends on the distance between query and key: a bound, and an expectation.

The bound depends on the table alone. The expectation also depends on the means and covariances of
queries and keys before rotation. All results are float64. docs/design/rotation.md has the
formulas.

Shapes: P = rotated pairs, M = distances, D = head dimensions (half-split pairs, the first 2P of
them rotate), H = pairs of a query head and its key head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.rope.angles import Angles, rotate
from ropewalk.rope.methods import Frequencies


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Mean and covariance of unrotated vectors, float64."""

    mean_HD: Tensor
    covariance_HDD: Tensor

    @property
    def spread_H(self) -> Tensor:
        """Return the root mean square distance from the mean, in the mean's own unit."""
        return self.covariance_HDD.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=0).sqrt()


def decay_bound(table: Frequencies, distances_M: Tensor) -> Tensor:
    """Return RoFormer's upper bound of a score by distance in tokens, relative units, [M].

    The bound is (1 / P) * sum over j = 1 .. P of |S_j|. S_j is the sum over pairs i < j of
    exp(1j * m * theta_i) (arXiv 2104.09864, section 3.4.3). It is multiplied by the square of the
    attention factor, by which scores grow. It leaves out the largest step between neighbouring
    pairs' products, which depends on the vectors.
    """
    turns_MP = _turns(table, distances_M)
    partial_sums_MP = turns_MP.cumsum(-1)
    return partial_sums_MP.abs().mean(-1) * table.attention_factor**2


def expected_score(
    query: Moments, key: Moments, table: Frequencies, distances_M: Tensor, scaling: float
) -> Tensor:
    """Return the mean logit of independent queries and keys, m tokens apart, [H, M].

    The query is m tokens after the key. `scaling` multiplies every logit (1 / sqrt(D) in most
    models). Dimensions that do not rotate count equally at every distance, without the attention
    factor. The log-n switch, caps of the logits and sinks are left out.
    """
    num_pairs = table.inv_freq_P.shape[0]
    rotated_H = (_pairs(query.mean_HD, num_pairs) * _pairs(key.mean_HD, num_pairs).conj())[:, None]
    turning_HM = (rotated_H * _turns(table, distances_M)).real.sum(-1)
    rest_HD = (query.mean_HD * key.mean_HD)[:, 2 * num_pairs :]
    return scaling * (table.attention_factor**2 * turning_HM + rest_HD.sum(-1, keepdim=True))


def score_spread(
    query: Moments, key: Moments, table: Frequencies, distances_M: Tensor, scaling: float
) -> Tensor:
    """Return the standard deviation of the logit with mean `expected_score`, [H, M].

    The result is exact if query and key are independent, whatever their distributions. If the query
    is rotated and scaled first, then the logit is a plain product u . k with variance
    mu_u' C_k mu_u + mu_k' C_u mu_k + trace(C_u C_k).
    """
    angle_MP = torch.outer(distances_M.double(), table.inv_freq_P.double())
    num_pairs = angle_MP.shape[-1]
    length_D = torch.ones(query.mean_HD.shape[-1], dtype=torch.float64)
    length_D[: 2 * num_pairs] = table.attention_factor**2
    spreads = []
    for angle_P in angle_MP:
        angles = Angles(angle_P.cos(), angle_P.sin())
        mean_HD = rotate(query.mean_HD, angles) * length_D
        # Rows, then columns: R C R'.
        half_HDD = rotate(query.covariance_HDD, angles) * length_D
        covariance_HDD = rotate(half_HDD.transpose(-1, -2), angles) * length_D
        variance_H = (
            _quadratic(key.covariance_HDD, mean_HD)
            + _quadratic(covariance_HDD, key.mean_HD)
            + (covariance_HDD * key.covariance_HDD).sum((-1, -2))
        )
        spreads.append(variance_H.clamp(min=0).sqrt())  # rounding may leave -1e-20
    return abs(scaling) * torch.stack(spreads, dim=-1)


def _turns(table: Frequencies, distances_M: Tensor) -> Tensor:
    """Return exp(1j * m * theta_i), complex128 [M, P]."""
    angle_MP = torch.outer(distances_M.double(), table.inv_freq_P.double())
    return torch.polar(torch.ones_like(angle_MP), angle_MP)


def _pairs(x_HD: Tensor, num_pairs: int) -> Tensor:
    """Return the rotated pairs as complex numbers, [H, P]."""
    return torch.complex(x_HD[:, :num_pairs], x_HD[:, num_pairs : 2 * num_pairs])


def _quadratic(matrix_HDD: Tensor, x_HD: Tensor) -> Tensor:
    """Return x' M x, [H]."""
    return torch.einsum("hd,hde,he->h", x_HD, matrix_HDD, x_HD)
