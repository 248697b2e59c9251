"""Byte layouts: sizes, round trips, and the borders of the number formats."""

from __future__ import annotations

import pytest
import torch

from paraflash import formats
from paraflash.cache.pool import RecordPool
from paraflash.cache.records import kv_format

RELEASED = {
    "nvfp4_ds_mla": (528, 288, 68),
    "fp8_ds_mla": (584, 584, 132),
    "bfloat16": (1024, 1024, 256),
    "float32": (2048, 2048, 512),
}


@pytest.mark.parametrize("name", RELEASED)
def test_records_have_the_released_sizes(name):
    fmt = kv_format(name, 512, 64, 128)
    assert (fmt.window.nbytes, fmt.latent.nbytes, fmt.index.nbytes) == RELEASED[name]


def test_a_token_of_global_kv_takes_890_bytes_as_trained():
    fmt = kv_format("nvfp4_ds_mla", 512, 64, 128)
    assert (3 / 2 + 1) * (fmt.latent.nbytes + fmt.index.nbytes) == 890


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize("dims", [(512, 64, 128), (64, 16, 64)])
def test_a_pool_gives_back_what_was_written_at_page_borders(name, dims):
    fmt = kv_format(name, *dims)
    for record in (fmt.window, fmt.latent, fmt.index):
        pool = RecordPool(record, 3, 32)
        slots = torch.tensor([0, 31, 32, 63, 64, 95])
        raw = record.encode(torch.randn(6, record.dim, generator=torch.Generator().manual_seed(1)) * 3)
        assert raw.shape == (6, record.nbytes)
        pool.write(slots, raw)
        assert torch.equal(pool.read_raw(slots), raw)
        assert torch.equal(pool.read(slots), record.decode(raw))
        assert not pool.read_raw(torch.tensor([1, 33])).any(), "neighbours stay untouched"


@pytest.mark.parametrize("name", ["nvfp4_ds_mla", "fp8_ds_mla"])
def test_rows_of_zeros_and_tiny_values_survive(name):
    fmt = kv_format(name, 512, 64, 128)
    for record in (fmt.window, fmt.latent, fmt.index):
        assert torch.equal(record.decode(record.encode(torch.zeros(2, record.dim))), torch.zeros(2, record.dim))
        assert record.decode(record.encode(torch.full((1, record.dim), 1e-9))).isfinite().all()


@pytest.mark.parametrize("k", [-12, -3, 0, 5])
def test_a_maximum_at_a_power_of_two_border_is_exact(k):
    top = torch.zeros(1, 512)
    top[0, 0] = 448 * 2.0**k
    fmt = kv_format("nvfp4_ds_mla", 512, 64, 128)
    assert fmt.window.decode(fmt.window.encode(top))[0, 0] == 448 * 2.0**k
    key = torch.zeros(1, 128)
    key[0, 3] = -6 * 2.0**k
    assert fmt.index.decode(fmt.index.encode(key))[0, 3] == -6 * 2.0**k


def test_trained_records_are_the_trained_rounding():
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(2)) * 5
    fmt = kv_format("nvfp4_ds_mla", 512, 64, 128)
    assert torch.equal(fmt.window.decode(fmt.window.encode(x)), formats.round_window(x))
    assert torch.equal(fmt.latent.decode(fmt.latent.encode(x)), formats.round_latent(x))
    assert torch.equal(fmt.index.decode(fmt.index.encode(x[:, :128])), formats.round_index(x[:, :128]))


def test_the_published_hopper_record_keeps_rope_channels_in_bf16():
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(3))
    record = kv_format("fp8_ds_mla", 512, 64, 128).latent
    back = record.decode(record.encode(x))
    assert torch.equal(back[:, 448:], x[:, 448:].bfloat16().float())
    assert (back[:, :448] - x[:, :448]).abs().max() <= x.abs().max() / 16


def test_e2m1_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0])
    want = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -1.0, -4.0])
    assert torch.equal(formats.e2m1_values(formats.e2m1_codes(ties)), want)


def test_power_of_two_scales_follow_the_bits():
    x = torch.tensor([1.0, 1.0000001, 2.0, 0.5, 0.75, 448.0 / 448])
    assert formats.pow2_ceil_exponent(x).tolist() == [0, 1, 1, -1, 0, 0]


def test_widths_that_do_not_fit_a_record_are_refused_by_name():
    with pytest.raises(ValueError, match=r"head_dim.*bfloat16"):
        kv_format("nvfp4_ds_mla", 48, 16, 64)
    with pytest.raises(ValueError, match="qk_rope_head_dim are both 64; use bfloat16"):
        kv_format("fp8_ds_mla", 64, 64, 64)
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int8'"):
        kv_format("int8", 512, 64, 128)
