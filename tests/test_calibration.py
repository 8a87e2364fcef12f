"""Calibration: checks, the file, and the balance with the least noise."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvstrata.quant.calibration import Calibration, LayerCalibration, pair_balance, pair_means


def calibration(layers: int = 3) -> Calibration:
    torch.manual_seed(0)
    parts = [
        LayerCalibration(torch.randint(-3, 4, (2, 32)).float().exp2() if i != 1 else None, torch.randn(2, 32))
        for i in range(layers)
    ]
    return Calibration(parts, [0.5, 0.25, 0.0], [0.1, 0.2, 0.3], 3, "a model")


def test_a_file_holds_everything(tmp_path):
    one = calibration()
    one.save(tmp_path / "c.safetensors")
    two = Calibration.load(tmp_path / "c.safetensors")
    assert len(two.layers) == 3
    assert two.shape == (2, 32)
    for a, b in zip(one.layers, two.layers, strict=True):
        for x, y in ((a.balance, b.balance), (a.centre, b.centre)):
            assert (x is None and y is None) or torch.equal(x, y)
    assert (two.k_sensitivity, two.v_sensitivity) == (one.k_sensitivity, one.v_sensitivity)
    assert (two.bits, two.model) == (3, "a model")


def test_a_file_says_which_layers_have_a_window(tmp_path):
    a, b, c = calibration().layers
    given = Calibration([a, b], windows=[c], kinds=["none", "layer", "window", "layer"])
    given.save(tmp_path / "c.safetensors")
    read = Calibration.load(tmp_path / "c.safetensors")
    assert read.kinds == ("none", "layer", "window", "layer")
    own = read.of_model(4, (2, 32))
    assert own[0].shape is None
    for layer, expected in zip(own[1:], (a, c, b), strict=True):
        assert torch.equal(layer.centre, expected.centre)
    with pytest.raises(ValueError, match="of a model with 5 layers, got one with 4"):
        read.of_model(5)
    with pytest.raises(ValueError, match="expected 2 KV heads and head_dim 64 in layer 1, got one with 2 and 32"):
        read.of_model(4, (2, 64))
    assert [x.shape for x in calibration().of_model(3)] == [(2, 32)] * 3
    with pytest.raises(ValueError, match="says which layers have a sliding window, got one that does not"):
        Calibration([a, b], windows=[c]).of_model(3)
    with pytest.raises(ValueError, match=r"kinds: expected 2 of layers and 1 of windows, got 1 and 1"):
        Calibration([a, b], windows=[c], kinds=["layer", "window"])
    with pytest.raises(ValueError, match="kinds: expected 'layer', 'window', 'none', got 'full'"):
        Calibration([a], kinds=["full"])


def test_other_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(FileNotFoundError, match="calibration file"):
        Calibration.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="folder"):
        calibration().save(tmp_path / "none" / "c")
    path = tmp_path / "c"
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(ValueError, match="is not one"):
        Calibration.load(path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="version"):
        Calibration.load(path)
    metadata = {"kind": "kvstrata.calibration", "version": "1", "layers": "1", "bits": "0", "model": ""}
    empty = {f"sensitivity.{side}": torch.zeros(0) for side in "kv"}
    for tensors, reason in (
        ({"balance.0": torch.full((2, 32), 3.0)}, "powers of two"),
        ({"balance.1": torch.ones(2, 32)}, "balance.1"),
        ({"centre.0": torch.full((2, 32), torch.nan)}, "finite"),
    ):
        save_file(tensors | empty, path, metadata=metadata)
        with pytest.raises(ValueError, match=reason):
            Calibration.load(path)


def test_arguments_of_files_are_named(tmp_path):
    path = tmp_path / "c"
    calibration().save(path)
    for wrong in (None, 3):
        with pytest.raises(TypeError, match="path: expected the path of a calibration file, got"):
            Calibration.load(wrong)
        with pytest.raises(TypeError, match="path: expected the path of a calibration file, got"):
            calibration().save(wrong)
    with pytest.raises(ValueError, match="device: expected one that torch knows, such as 'cpu' or 'cuda', got 'foo'"):
        Calibration.load(path, "foo")
    with pytest.raises(IsADirectoryError, match="path: expected a file, got the folder"):
        calibration().save(tmp_path)


def test_a_file_without_a_tensor_is_damaged(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "c"
    metadata = {"kind": "kvstrata.calibration", "version": "1", "layers": "1", "bits": "0", "model": ""}
    save_file({"sensitivity.v": torch.zeros(0)}, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"is damaged: no tensor sensitivity\.k$"):
        Calibration.load(path)


@pytest.mark.parametrize("value", [-1.0, 1e308, float("inf"), float("nan")])
def test_sensitivities_have_a_range(value):
    with pytest.raises(ValueError, match=r"v_sensitivity: expected numbers from 0 to 1e\+30, got"):
        Calibration([LayerCalibration()], [1.0], [value])
    assert Calibration([LayerCalibration()], [1e30], [1e30]).sensitivity == (2e30,)


@pytest.mark.parametrize("value", [0.0, -2.0, 3.0, 512.0, 2.0**-9, torch.inf, torch.nan])
def test_a_balance_is_of_powers_of_two(value):
    balance = torch.ones(2, 32)
    balance[1, 3] = value
    with pytest.raises(ValueError, match="balance: expected powers of two"):
        LayerCalibration(balance)


def test_mismatched_sizes_raise():
    with pytest.raises(ValueError, match="centre: expected shape"):
        LayerCalibration(torch.ones(2, 32), torch.ones(1, 32))
    with pytest.raises(TypeError, match="float32"):
        LayerCalibration(torch.ones(2, 32).half())
    with pytest.raises(ValueError, match="one \\(kv_heads, head_dim\\)"):
        Calibration([LayerCalibration(torch.ones(2, 32)), LayerCalibration(torch.ones(2, 64))])
    with pytest.raises(ValueError, match="k_sensitivity"):
        Calibration([LayerCalibration()], [1.0, 2.0])
    with pytest.raises(ValueError, match="of a model with 3 layers of 2 and 32"):
        calibration().check(3, 4, 32)
    calibration().check(3, 2, 32)


def test_pairs_share_a_mean():
    x = torch.arange(8.0).view(1, 8)
    assert pair_means(x, 0, False).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert pair_means(x, 4, False).tolist() == [[2, 3, 4, 5, 2, 3, 4, 5]]
    assert pair_means(x, 4, True).tolist() == [[0.5, 0.5, 2.5, 2.5, 4.5, 4.5, 6.5, 6.5]]
    assert pair_means(x, 2, False).tolist() == [[1, 2, 1, 2, 4, 5, 6, 7]]


def test_no_other_powers_of_two_have_less_noise():
    """Noise of a score with one step for the whole row: sum(q² s²) * sum(k² / s²)."""
    k, q = torch.tensor([[900.0, 2.0, 0.3, 5.0]]), torch.tensor([[0.2, 3.0, 50.0, 1.0]])
    s = pair_balance(k, q)

    def noise(s: torch.Tensor) -> float:
        return float((q * s * s).sum() * (k / (s * s)).sum())

    bound = float((k * q).sqrt().sum() ** 2)  # Cauchy-Schwarz
    assert bound <= noise(s) <= 1.6 * bound
    assert noise(torch.ones(1, 4)) > 2 * bound, "the case is too easy to tell"
    best = min(noise(torch.tensor([powers]).exp2()) for powers in itertools.product(range(-4, 5), repeat=4))
    assert noise(s) <= 1.25 * best


def test_channels_without_k_or_q_stay_within_bounds():
    k, q = torch.ones(2, 32), torch.ones(2, 32)
    k[0, :4] = 0.0
    q[1, 5] = 0.0
    k[1, 6] = 1e30
    LayerCalibration(pair_balance(k, q))
    LayerCalibration(pair_balance(torch.zeros(1, 32), torch.zeros(1, 32)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_divided_k_stays_far_within_float16(interleaved):
    """Also where one channel of a pair has all its energy: the root mean square is at most an eighth of the range."""
    largest, whole = 2.0**20.4, torch.zeros(1, 8)
    whole[0, 0] = largest**2
    s = pair_balance(torch.full((1, 8), 1e-4), torch.ones(1, 8), 4, interleaved, whole)
    assert s[0, 0] == s[0, 1 if interleaved else 4] == 2.0**8
    assert largest / s[0, 0] <= 2.0**13
    assert (s == 1).sum() == 6


def test_sensitivities_of_k_and_v_add_up():
    assert Calibration([LayerCalibration()] * 2, [1.0, 2.0], [10.0, 20.0], 2).sensitivity == (11.0, 22.0)


def test_fingerprints_differ_with_balances_and_centres():
    ones = torch.ones(2, 64)
    parts = [LayerCalibration(ones), LayerCalibration(ones, ones), LayerCalibration(ones, 2 * ones)]
    parts += [LayerCalibration(2 * ones, ones), LayerCalibration(None, ones), LayerCalibration()]
    assert len({Calibration([part]).fingerprint for part in parts}) == len(parts)
    of_windows = [Calibration([LayerCalibration()], windows=[part]) for part in parts]
    assert len({x.window_fingerprint for x in of_windows}) == len(parts)
    assert len({x.fingerprint for x in of_windows}) == 1


def test_shapes_are_those_of_layers_that_have_one():
    given = Calibration([LayerCalibration(), LayerCalibration(torch.ones(4, 64))])
    assert given.shape == (4, 64)
    with pytest.raises(ValueError, match="expected 2 layers of 2 KV heads and head_dim 64, got one with 2 layers of 4"):
        given.check(2, 2, 64)
    with pytest.raises(ValueError, match=r"windows: expected one \(kv_heads, head_dim\) in all of them"):
        Calibration([], windows=[LayerCalibration(torch.ones(2, 32)), LayerCalibration(torch.ones(2, 64))])


def test_heads_are_balanced_on_their_own():
    """A common factor of a head's channels changes nothing."""
    k, q = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0)).mul(4).exp()
    together = pair_balance(k, q * torch.tensor([[1.0], [1e-4], [1e3]]), 8)
    for head in range(3):
        assert torch.equal(together[head], pair_balance(k[head, None], q[head, None], 8)[0])


@pytest.mark.gpu
def test_a_copy_on_a_device_has_windows():
    one = calibration()
    moved = Calibration(one.layers, windows=one.layers[:2]).to("cuda")
    for own in (*moved.layers, *moved.windows):
        assert own.centre.is_cuda
        assert own.balance is None or own.balance.is_cuda
    assert (len(moved.layers), len(moved.windows)) == (3, 2)
