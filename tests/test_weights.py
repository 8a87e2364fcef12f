"""Balance and centre from the projections of Q and K, against sums over all positions of the horizon."""

from __future__ import annotations

import pytest
import torch

from kvstrata.quant import weights
from kvstrata.quant.calibration import pair_balance
from kvstrata.quant.projection import Projection
from kvstrata.quant.rope import pair_channels

KV_HEADS, GROUP, DIM = 2, 3, 20
ROPE = [1e4 ** (-i / 8) for i in range(8)]  # channels 16 to 19 are not rotated


def turns() -> torch.Tensor:
    """Angle of each pair at all positions of the horizon, float64 ``[positions, pairs]``."""
    return torch.arange(weights.HORIZON, dtype=torch.float64)[:, None] * torch.tensor(ROPE, dtype=torch.float64)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_centre_is_the_mean_of_the_bias_as_rope_turns_it(interleaved: bool) -> None:
    bias = torch.randn(KV_HEADS, DIM, generator=torch.Generator().manual_seed(0))
    one, two = pair_channels(len(ROPE), interleaved=interleaved)
    x, y, angle = bias[:, None, one].double(), bias[:, None, two].double(), turns()
    expected = bias.double()
    expected[:, one] = (x * angle.cos() - y * angle.sin()).mean(1)
    expected[:, two] = (y * angle.cos() + x * angle.sin()).mean(1)
    given = weights.centre_from_weights(Projection(bias=bias.flatten()), KV_HEADS, DIM, ROPE, interleaved)
    torch.testing.assert_close(given.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_balance_counts_biases(interleaved: bool, seed: int) -> None:
    """Of Q the whole bias, averaged over the heads of a KV head; of K what its centre leaves."""
    generator = torch.Generator().manual_seed(seed)

    def projection(heads: int) -> Projection:
        size = torch.randn(heads * DIM, 1, generator=generator).mul(2).exp()
        weight = size * torch.randn(heads * DIM, 12, generator=generator)
        return Projection(weight, 9 * torch.randn(heads * DIM, generator=generator))

    q, k = projection(KV_HEADS * GROUP), projection(KV_HEADS)
    removed = turns().cos().mean(0).square() + turns().sin().mean(0).square()
    removed = removed.repeat_interleave(2) if interleaved else removed.repeat(2)
    removed = torch.cat([removed, torch.ones(DIM - 2 * len(ROPE))])
    own, offset = k.weight.double().square().sum(1).view(-1, DIM), k.bias.double().square().view(-1, DIM)
    q_square = (q.weight.double().square().sum(1) + q.bias.double().square()).view(KV_HEADS, GROUP, DIM).mean(1)
    expected = pair_balance(own + offset * (1 - removed), q_square, len(ROPE), interleaved, own + offset)
    given = weights.balance_from_weights(q, k, KV_HEADS, DIM, ROPE, interleaved)
    assert torch.equal(given, expected)
