"""Counts of the cost model at the released size, against numbers worked out by hand from model.md."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paraflash.planner.cost import (
    all_reduce_term,
    attention_term,
    engram_term,
    experts_touched,
    gemm_term,
    index_term,
    launch_term,
    linears,
    moe_term,
    pcp_term,
    residual_term,
    step_cost,
)
from paraflash.planner.hardware import exchange_bytes, exchange_seconds
from paraflash.planner.workload import Workload, key_counts, layer_chunks, steps
from paraflash.topology import Topology

from .helpers import hardware, one_layer, released, setup, step


def parameters(layer: int, tp: int, *parts: str) -> int:
    return sum(x.outputs * x.inputs for x in linears(released(), tp)[layer] if any(p in x.name for p in parts))


def test_dense_parameters_of_a_plain_layer():
    attention = 1280 * 5120 + 32768 * 1280 + 512 * 5120 + 8192 * 4096 + 5120 * 8192
    assert attention == 126_615_552
    assert parameters(3, 1, ".attn.") == attention
    assert parameters(3, 1, "shared_experts") == 3 * 2304 * 5120
    assert parameters(3, 1, "ffn.gate") == 384 * 5120
    assert parameters(3, 1, "hc_") == 2 * 24 * 20480


def test_compressor_indexer_and_engram_parameters():
    assert parameters(2, 1, "compressor") == 2 * 512 * 5120
    assert parameters(20, 1, "compressor") == 512 * 5120
    assert parameters(24, 1, "indexer") == 4096 * 1280 + 32 * 5120
    assert parameters(8, 1, "indexer") == 4096 * 1280 + 32 * 5120 + 128 * 512
    assert parameters(14, 1, "engram") == 25600 * 6144


def test_tp_shares_out_only_the_wide_linears():
    replicated = 1280 * 5120 + 512 * 5120
    wide = 126_615_552 - replicated
    assert parameters(3, 8, ".attn.") == replicated + wide // 8
    assert parameters(3, 8, "ffn.gate", "hc_") == parameters(3, 1, "ffn.gate", "hc_")
    assert parameters(2, 8, "compressor", "indexer") == parameters(2, 1, "compressor", "indexer")
    assert parameters(1, 8, "engram") == parameters(1, 1, "engram")


def test_about_16_billion_parameters_work_on_a_token():
    one = step(0, 1, finished=True)
    base = setup(tp=1)
    flops = (
        sum(term(base, one).flops for term in (gemm_term, moe_term, residual_term)) + engram_term(base, one, 0.0).flops
    )
    assert flops / 2 == pytest.approx(16e9, rel=0.02)


def test_routed_experts_work_counts_six_of_384():
    assert moe_term(setup(tp=1), step(0, 10)).flops == pytest.approx(10 * 40 * 6 * 3 * 2 * 5120 * 2304)


def test_experts_touched_by_few_and_by_many_rows():
    assert experts_touched(released(), 1) == pytest.approx(6)
    assert experts_touched(released(), 4096) == pytest.approx(384)


def test_moe_time_is_the_same_for_every_split_of_a_world():
    times = {moe_term(setup(tp, 8 // tp), step(0, 4096)).seconds for tp in (8, 4, 2, 1)}
    assert max(times) == pytest.approx(min(times))


def test_attention_flops_count_640_keys_past_the_start_and_128_in_window_layers():
    term = attention_term(setup(tp=1), step(100_000, 10))
    assert term.flops == 10 * (38 * 640 + 2 * 128) * 64 * 512 * 4


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_attention_gets_no_cheaper_with_fewer_heads_a_rank(tp):
    work = step(8192, 4096)
    assert attention_term(setup(tp), work).seconds == attention_term(setup(1), work).seconds
    assert attention_term(setup(tp, 8 // tp), work).seconds == pytest.approx(
        attention_term(setup(1), work).seconds * tp / 8
    )


def test_index_scores_are_replicated_over_tp_and_split_over_pcp():
    work = step(8192, 4096)
    assert index_term(setup(8, 1), work).seconds == index_term(setup(2, 1), work).seconds
    assert index_term(setup(2, 4), work).seconds == pytest.approx(index_term(setup(8, 1), work).seconds / 4)


def test_index_flops_count_every_visible_entry_once_there_are_more_than_topk():
    # Ratio 1: position t sees t + 1 entries; 511 sees 512 and needs no scores, 512 sees 513.
    assert key_counts(released(), 1, ((511, 2),))[1] == 513
    assert key_counts(released(), 2, ((1023, 2),))[1] == 0
    assert key_counts(released(), 2, ((1025, 1),))[1] == 513
    term = index_term(one_layer(setup(), 20), step(32768, 1))
    assert term.flops == 32769 * 32 * 128 * 2


def test_attended_keys_at_the_start_of_a_prompt():
    # Position t of a ratio-2 layer: t + 1 window keys and (t + 1) // 2 entries.
    assert key_counts(released(), 2, ((0, 3),))[0] == (1 + 0) + (2 + 1) + (3 + 1)
    assert key_counts(released(), 0, ((126, 3),))[0] == 127 + 128 + 128


def test_attention_of_one_layer_agrees_with_the_measured_kernel():
    # H200, 64 heads, 640 keys, 4096 queries: 0.64 ms with all keys in L2, up to 0.86 ms from a large pool.
    term = attention_term(one_layer(setup(1, gpu="H200"), 21), step(100_000, 4096))
    assert 0.637e-3 <= term.seconds <= 0.863e-3


def test_index_of_one_layer_agrees_with_the_measured_kernels():
    # H200, 4096 queries on up to 32768 keys: scores 1.09 ms, torch.topk 1.61 ms.
    term = index_term(one_layer(setup(1, gpu="H200"), 20), step(32768 - 2048, 4096))
    assert term.seconds == pytest.approx(2.70e-3, rel=0.1)


def test_all_reduce_moves_the_hidden_of_the_pcp_ranks_rows_twice_a_layer_and_once_for_the_embedding():
    term = all_reduce_term(setup(4, 2), step(0, 4096))
    assert term.nbytes == pytest.approx(81 * 2 * 3 / 4 * 2048 * 5120 * 2)
    assert all_reduce_term(setup(1, 8), step(0, 4096)).seconds == 0


def test_pcp_exchange_counts_halo_latents_partners_and_the_moe_rows():
    rows, pcp = 4096, 4
    term = pcp_term(setup(2, pcp), step(0, rows))
    halo = 40 * 8 * 127 * 584
    latents = (3 / 2 + 1) * rows * (584 + 132)
    partners = 3 * 8 * 1024 * 4
    moe = 40 * rows * (2 * 5120 * 2 + 6 * 8)
    assert term.nbytes == pytest.approx((halo + latents + partners + moe) * 3 / 4)
    assert pcp_term(setup(8, 1), step(0, rows)).seconds == 0


def test_short_chunks_give_all_their_rows_as_halo():
    base = one_layer(setup(2, 4), 0)
    assert pcp_term(base, step(0, 3)).nbytes == pytest.approx((3 * 584 + 3 * (2 * 5120 * 2 + 48)) * 3 / 4)


def test_engram_counts_24_rows_of_264_bytes_from_the_host_and_hides_them_behind_earlier_layers():
    work, base = step(0, 1000), setup()
    shown, hidden = engram_term(base, work, 0.0), engram_term(base, work, 1.0)
    fetch = 2 * 1000 * 24 * 264
    assert shown.seconds - hidden.seconds == pytest.approx(fetch / base.hardware.host_bandwidth)
    assert hidden.flops == 2 * 2 * 1000 * 25600 * 6144


def test_launches_cost_nothing_while_the_device_is_slower():
    assert launch_term(setup(), 1.0).seconds == 0
    assert launch_term(setup(), 0.0).seconds > 0


def test_bounded_replay_runs_the_decoder_on_trailing_rows_only():
    model, work = released(), step(4096, 4096, replay=True)
    kept = ((8192 - 128, 128),)
    assert layer_chunks(model, model.layers[19], work) == (work.chunks, work.chunks)
    assert layer_chunks(model, model.layers[20], work) == (work.chunks, kept)
    assert layer_chunks(model, model.layers[21], work) == (kept, kept)


def test_bounded_replay_about_halves_the_flops_of_a_prompt():
    def flops(replay: bool) -> float:
        return sum(term.flops for term in step_cost(setup(1), step(0, 8192, replay)).terms.values())

    assert flops(False) / flops(True) == pytest.approx(2, rel=0.06)


def test_steps_fill_the_budget_with_the_next_prompt():
    done = steps(Workload(input_len=5, concurrency=2, batch_budget=4))
    assert [s.chunks for s in done] == [((0, 4),), ((4, 1), (0, 3)), ((3, 2),)]
    assert [s.finished for s in done] == [(), (0,), (1,)]
    assert sum(s.rows for s in done) == 10


@pytest.mark.parametrize("field", ["input_len", "concurrency", "batch_budget"])
def test_a_workload_of_nothing_is_refused(field):
    with pytest.raises(ValueError, match=f"{field} is 0"):
        Workload(**{"input_len": 1, "concurrency": 1, "batch_budget": 1, field: 0})


def test_terms_sum_to_the_step_and_are_finite():
    cost = step_cost(setup(2, 4), step(0, 4096))
    assert cost.seconds == pytest.approx(sum(t.seconds for t in cost.terms.values()))
    assert all(math.isfinite(t.seconds) and t.seconds >= 0 for t in cost.terms.values())


def test_better_hardware_is_never_slower():
    base = setup(2, 4)
    before = step_cost(base, step(8192, 4096)).seconds
    for field in ("bf16_flops", "fp8_flops", "memory_bandwidth", "link_bandwidth"):
        faster = replace(base.hardware, **{field: 2 * getattr(base.hardware, field)})
        assert step_cost(replace(base, hardware=faster), step(8192, 4096)).seconds < before


def test_later_positions_and_more_rows_cost_more():
    base = setup(4, 2)
    assert step_cost(base, step(65536, 4096)).seconds > step_cost(base, step(8192, 4096)).seconds
    assert step_cost(base, step(8192, 4096)).seconds > step_cost(base, step(8192, 2048)).seconds


def test_ring_collective_sizes():
    assert exchange_bytes("all_reduce", 800, 8) == 1400
    assert exchange_bytes("all_gather", 800, 8) == exchange_bytes("reduce_scatter", 800, 8) == 700
    gpu = hardware()
    assert exchange_seconds("all_gather", 8e9, 8, gpu) == pytest.approx(
        gpu.collective_latency + 7e9 / gpu.link_bandwidth
    )
    assert exchange_seconds("all_reduce", 8e9, 1, gpu) == 0


def test_unknown_collectives_and_sizes_are_refused():
    with pytest.raises(ValueError, match="op is 'all_to_all'"):
        exchange_seconds("all_to_all", 1, 2, hardware())
    with pytest.raises(ValueError, match="nbytes is -1"):
        exchange_seconds("all_gather", -1, 2, hardware())
    with pytest.raises(ValueError, match="group is 0"):
        exchange_seconds("all_gather", 1, 0, hardware())


def test_topologies_print_as_in_the_published_tables():
    assert str(Topology(4, 2)) == "TP4/PCP2"
