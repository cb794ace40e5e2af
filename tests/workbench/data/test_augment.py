import torch

from gradwire.workbench.data.augment import crop_and_flip
from gradwire.workbench.data.dataset import Dataset


def picture(n=1):
    """Images whose every pixel is its own place, none black."""
    return (1 + torch.arange(8 * 8, dtype=torch.uint8)).reshape(1, 1, 8, 8).repeat(n, 3, 1, 1)


def candidates(pad):
    """Every crop of the picture, straight and mirrored."""
    padded = torch.nn.functional.pad(picture(), (pad, pad, pad, pad))
    for top in range(2 * pad + 1):
        for left in range(2 * pad + 1):
            crop = padded[:, :, top : top + 8, left : left + 8]
            yield crop
            yield crop.flip(3)


def test_each_image_is_a_crop_or_its_mirror_image():
    known = {tuple(c.flatten().tolist()) for c in candidates(2)}
    out = crop_and_flip(picture(400), seed=1, pad=2)
    crops = {tuple(image.flatten().tolist()) for image in out}
    assert crops <= known
    assert len(crops) > 0.95 * len(known)


def test_the_seed_decides_and_nothing_global_moves():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    a, b, c = (crop_and_flip(picture(50), seed) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.rand(1), expected)


def test_half_of_the_images_are_mirrored():
    out = crop_and_flip(picture(2000), seed=3, pad=0)
    mirrored = (out == picture(2000).flip(3)).flatten(1).all(1)
    assert 0.45 < mirrored.float().mean() < 0.55


def test_only_training_images_are_augmented():
    labels = torch.zeros(50, dtype=torch.int64)
    data = Dataset("x", picture(50), labels, picture(50), labels, (0.5,) * 3, (0.5,) * 3, True)
    trained, _ = data.training_batch(torch.arange(50), seed=1)
    tested, _ = data.test_batch(0, 50)
    assert torch.equal(tested, data.normalise(picture(50)))
    assert not torch.equal(trained, tested)
