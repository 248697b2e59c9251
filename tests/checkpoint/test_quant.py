"""Stored formats: vectors of model.md 2.3 and 3.7, borders of the scale rules, exact round trips."""

import pytest
import torch

from paraflash.checkpoint import quant


def test_e8m0_bytes_are_powers_of_two_from_the_bits() -> None:
    scale = quant.e8m0_to_float(torch.arange(256, dtype=torch.uint8))
    assert scale[0].item() == 2.0**-127
    for byte in (1, 115, 127, 128, 254):
        assert scale[byte].item() == 2.0 ** (byte - 127)
    assert scale[255].isnan()


def test_published_fp8_sample() -> None:
    codes = torch.tensor([[0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5]], dtype=torch.uint8)
    values = quant.fp8_block_dequant(codes.view(torch.float8_e4m3fn), torch.tensor([[0x73]], dtype=torch.uint8))
    expected = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert values[0].tolist() == expected


def test_fp4_holds_the_even_column_in_the_low_nibble() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0], packed[0, 1] = 0xA1, 0x7F  # nibbles 1, A, F, 7
    values = quant.fp4_dequant(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert values[0, :4].tolist() == [1.0, -2.0, -12.0, 12.0]


def test_every_e2m1_tie_goes_to_the_even_code() -> None:
    row = torch.zeros(1, 32)
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    row[0, : len(ties)] = torch.tensor(list(ties))
    row[0, 10:17] = -row[0, :7]
    row[0, 31] = 6.0  # scale 1
    packed, scale = quant.fp4_quant(row)
    assert scale.tolist() == [[127]]
    values = quant.fp4_dequant(packed, scale)[0]
    assert values[:7].tolist() == list(ties.values())
    assert values[10:17].tolist() == [-v for v in ties.values()]


@pytest.mark.parametrize(("largest", "byte"), [(448.0, 127), (448.5, 128), (896.0, 128), (0.0, 127 - 22)])
def test_fp8_block_scale_at_its_borders(largest: float, byte: int) -> None:
    weight = torch.zeros(32, 32)
    weight[3, 5] = -largest
    codes, scale = quant.fp8_block_quant(weight)
    assert scale.tolist() == [[byte]]
    decoded = quant.fp8_block_dequant(codes, scale)
    assert abs(decoded[3, 5].item() + largest) <= largest / 16


def test_ragged_fp8_blocks_round_trip_values_that_have_codes() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (70, 45), dtype=torch.uint8, generator=generator)
    codes[(codes & 0x7F) == 0x7F] = 0x7E  # NaN codes
    codes[::32, ::32] = 0x7E  # the largest value, so that the scale is found again
    scale = torch.randint(116, 125, (3, 2), dtype=torch.uint8, generator=generator)
    values = quant.fp8_block_dequant(codes.view(torch.float8_e4m3fn), scale)
    again, found = quant.fp8_block_quant(values)
    assert torch.equal(found, scale)
    assert torch.equal(quant.fp8_block_dequant(again, found), values)
    part = quant.fp8_block_dequant(codes.view(torch.float8_e4m3fn)[40:60, 33:], scale[1:2, 1:], 8, 1)
    assert torch.equal(part, values[40:60, 33:])


def test_engram_rows_have_one_scale_per_32_channels() -> None:
    rows = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    rows[:, 32:64] *= 1000
    codes, scale = quant.row_quant(rows)
    assert scale.shape == (5, 8)
    decoded = quant.row_dequant(codes, scale)
    assert (
        (decoded - rows).abs() <= rows.abs() / 16 + 2.0**-9 * quant.e8m0_to_float(scale).repeat_interleave(32, 1)
    ).all()


def test_dequantised_weights_are_exact_in_bfloat16() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(32, 1).view(torch.float8_e4m3fn)
    scale = torch.arange(110, 118, dtype=torch.uint8)[None]
    exact = quant.fp8_block_dequant(codes, scale).nan_to_num(0)
    assert torch.equal(exact.bfloat16().float(), exact)
