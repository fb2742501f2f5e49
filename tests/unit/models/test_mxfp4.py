import pytest
import torch

from components.models.mxfp4 import decode, decode_pairs, decode_transposed

VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def block(*first_bytes):
    return torch.tensor([[*first_bytes, *[0] * (16 - len(first_bytes))]], dtype=torch.uint8)


def scale(value):
    return torch.tensor([value], dtype=torch.uint8)


def test_the_low_nibble_comes_first():
    assert decode(block(0x21), scale(127))[:3].tolist() == [0.5, 1.0, 0.0]


def test_all_sixteen_numbers_and_the_scale():
    bytes_ = [low | (low + 1) << 4 for low in range(0, 16, 2)]
    got = decode(block(*bytes_), scale(130))
    assert got.dtype == torch.bfloat16
    assert got[:16].tolist() == [8.0 * v for v in [*VALUES, *(-v for v in VALUES)]]
    assert decode(block(0x01), scale(127 - 120))[0] == 0.5 * 2.0**-120


def test_the_smallest_and_the_largest_scale_are_exact():
    assert float(decode(block(0x07), scale(0))[0]) == 6 * 2.0**-127
    assert float(decode(block(0x02), scale(254))[0]) == 2.0**127
    for bad, number in ((0x07, 254), (0x01, 255)):
        with pytest.raises(ValueError, match="scale of 255"):
            decode(block(bad), scale(number))


def test_experts_are_transposed_to_in_by_out():
    """Square, like gpt-oss's down_proj: a wrong transpose would pass every check of shapes."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 64, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 64, 2), generator=generator, dtype=torch.uint8)
    got = decode_transposed(blocks, scales)
    assert got.shape == (2, 64, 64)
    assert not torch.equal(got, got.transpose(1, 2))
    signed = [*VALUES, *(-v for v in VALUES)]
    for expert, out, column in ((0, 0, 0), (1, 5, 63), (1, 63, 5), (0, 17, 32), (1, 40, 31)):
        group, place = divmod(column, 32)
        byte = int(blocks[expert, out, group, place // 2])
        nibble = byte >> 4 if place % 2 else byte & 15
        value = signed[nibble] * 2.0 ** (int(scales[expert, out, group]) - 127)
        assert float(got[expert, column, out]) == value


def test_pairs_are_found_by_name_and_halves_stay():
    blocks, scales = torch.zeros(1, 3, 1, 16, dtype=torch.uint8), torch.zeros(1, 3, 1).byte()
    state = {"a.w_blocks": blocks, "a.w_scales": scales, "b_scales": scales, "c": scales}
    got = decode_pairs(state)
    assert sorted(got) == ["a.w", "b_scales", "c"]
    assert got["a.w"].shape == (1, 32, 3)
    with pytest.raises(ValueError, match=r"^a\.w: MXFP4 blocks .* do not fit"):
        decode_pairs(state | {"a.w_scales": scales[:, :2]})


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (torch.zeros(1, 16), torch.zeros(1).byte(), "uint8, not torch.float32"),
        (torch.zeros(1, 8).byte(), torch.zeros(1).byte(), "do not fit"),
    ],
)
def test_what_is_no_mxfp4_is_an_error(blocks, scales, message):
    with pytest.raises(ValueError, match=message):
        decode(blocks, scales)
