"""Adversarial inputs and masks are what their names say, whatever the shape."""

import pytest
import torch

from frontier.judge.stress import FAMILIES, MASKS, normal_rows, padded_prefixes

SHAPES = [(4, 40, 16), (1, 1, 2), (2, 7, 5)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_finite_and_of_the_shape(name: str, shape: tuple[int, int, int]) -> None:
    x_BSD = FAMILIES[name](normal_rows(shape, generator()))
    assert x_BSD.shape == shape and x_BSD.dtype == torch.float32 and bool(x_BSD.isfinite().all())
    assert shape[1] == 1 or not torch.equal(x_BSD, normal_rows(shape, generator()))


def test_the_families_are_what_they_are_called() -> None:
    made = {name: spoil(normal_rows((4, 40, 16), generator())) for name, spoil in FAMILIES.items()}
    assert bool((made["constant rows"].std(2) == 0).any(1).all()), "each row of the batch has constant tokens"
    assert not bool((made["constant rows"].std(2) == 0).all()), "and others"
    assert bool((made["huge outlier"].abs().amax((1, 2)) == 1e4).all()) and int((made["huge outlier"] > 100).sum()) == 4
    assert torch.equal(made["ties"][:, 1::2], made["ties"][:, ::2])
    assert 0 < float(made["tiny variance"].var(2).max()) < 1e-7
    signs = made["alternating sign"].sign()
    assert torch.equal(signs[..., 1:], -signs[..., :-1])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_masks_are_what_they_are_called(shape: tuple[int, int, int]) -> None:
    draw_BS = torch.rand(shape[:2], generator=generator())
    made = {name: mask(draw_BS) for name, mask in MASKS.items()}
    assert all(valid_BS.shape == shape[:2] and valid_BS.dtype == torch.bool for valid_BS in made.values())
    prefix = made["prefix"]
    assert bool(prefix[:, 0].all()) and bool((prefix[:, 1:] <= prefix[:, :-1]).all())
    assert torch.equal(made["left padding"], prefix.flip(1))
    assert bool((made["one valid token"].sum(1) == 1).all()) and not bool(made["none valid"].any())
    if shape[1] == 40:
        holes = made["holes"]
        assert bool((holes[:, 1:] > holes[:, :-1]).any(1).all()), "a valid token behind an invalid one in each row"
        assert 0.5 < float(holes.float().mean()) < 0.9 and not bool(prefix.all())


@pytest.mark.parametrize("padding", [0.3, 0.99])
def test_padded_lengths_reach_from_the_shortest_to_the_whole(padding: float) -> None:
    lengths = padded_prefixes((3000, 10, 1), generator(), padding).sum(1)
    assert int(lengths.min()) == max(1, round(10 * (1 - padding))) and int(lengths.max()) == 10


def test_rows_are_scaled_standard_normal_by_seed() -> None:
    x_BSD = normal_rows((50, 40, 10), generator(5), 3.0)
    assert torch.equal(x_BSD, normal_rows((50, 40, 10), generator(5)) * 3.0)
    assert not torch.equal(x_BSD, normal_rows((50, 40, 10), generator(6), 3.0))
    assert abs(float(x_BSD.std()) - 3.0) < 0.1
