"""The trainer's own parts: straight-through rounding, Sinkhorn gradient, tasks, tokenizer, a step in every phase."""

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from paraflash import formats as engine
from paraflash.checkpoint.quant import fp8_block_dequant, fp8_block_quant
from training import problems, rounding, tasks, testset
from training.attention import largest
from training.data import Shape, batches
from training.model import Miniature
from training.optimiser import orthogonalise
from training.sinkhorn import backward_reference, forward_reference
from training.train import Trainer, judged, prepare, schedule
from training.vocabulary import tokenizer_json

PROBLEMS = Path(__file__).parents[1] / "data" / "miniature"


@pytest.fixture
def values() -> torch.Tensor:
    """Values over many magnitudes, with exact ties and a row of zeros."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 3, 64)[:, None]
    x[1] = torch.arange(128) / 16 - 4
    x[2] = 0
    x[3, :2] = torch.tensor([448.0, 6.0])
    return x


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (rounding.mxfp8, engine.round_window),
        (rounding.nvfp4, engine.round_latent),
        (rounding.mxfp4, engine.round_index),
        (rounding.blocks, lambda w: fp8_block_dequant(*fp8_block_quant(w))),
    ],
)
def test_straight_through_rounding_gives_the_engines_values(values, ours, theirs) -> None:
    # x + (rounded - x) may be off by an ulp of x
    torch.testing.assert_close(ours(values), theirs(values), rtol=3e-7, atol=0)


def test_rounding_passes_the_gradient_on_unchanged(values) -> None:
    with torch.enable_grad():
        x = values.clone().requires_grad_()
        rounding.nvfp4(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_sinkhorn_gradient_equals_the_unrolled_one() -> None:
    x = torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weight = torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    with torch.enable_grad():
        x.requires_grad_()
        c = forward_reference(x, 20, 1e-6)
        (expected,) = torch.autograd.grad((c * weight).sum(), x)
    torch.testing.assert_close(backward_reference(c.detach(), weight, 20), expected, atol=2e-3, rtol=0)


def test_orthogonalised_update_has_singular_values_near_one() -> None:
    g = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(5))
    s = torch.linalg.svdvals(orthogonalise(g, torch.float32))
    assert s.min() > 0.5 and s.max() < 1.3


def test_task_text_encodes_as_the_tokenizer_does() -> None:
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(tasks.vocab())))
    rng = Random(11)
    for sequence in (
        tasks.short_sequence(rng, 500),
        tasks.recall_sequence(rng, 500, 500, "pairs"),
        tasks.recall_sequence(rng, 500, 500, "recall"),
    ):
        text = tokenizer.decode(sequence.ids, skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False).ids == sequence.ids
        assert len(sequence.ids) == len(sequence.weight) == len(sequence.task) == len(sequence.route)


def test_every_word_of_the_tasks_is_one_token() -> None:
    for word in (" lamp", " fox", " red", "Find", " apples", " q", "Tom"):
        assert len(tasks.encode(word)) == 1


def test_training_batches_repeat_for_a_seed_and_differ_between_seeds() -> None:
    one, two, other = (tasks.training_batch(seed, 4, 128, 128) for seed in (5, 5, 6))
    assert all((one[k] == two[k]).all() for k in one)
    assert (one["ids"] != other["ids"]).any()


def test_loss_weights_point_at_the_answers() -> None:
    sequence = tasks.Sequence()
    sequence.add(tasks.look_up("pairs", (" red fox:", " lamp stone"), "Notes:"))
    predicted = [sequence.ids[i + 1] for i in range(len(sequence.ids) - 1) if sequence.weight[i] >= 1]
    assert predicted == tasks.encode(" lamp stone")
    assert sequence.ids[sequence.starts[0]] == tasks.encode(" red")[0]


def test_sources_point_at_the_answer_in_the_notes() -> None:
    batch = tasks.training_batch(5, 4, 512, 512, "prs")
    for ids, targets, weight, task, source in zip(
        *(batch[name] for name in ("ids", "targets", "weight", "task", "source")), strict=True
    ):
        looked_up = (weight == 1.0) & ((task == 0) | (task == 1))  # the values, not the repeated key
        assert ((source >= 0) == looked_up).all()
        rows = looked_up.nonzero()[0]
        assert (ids[source[rows]] == targets[rows]).all() and (source[rows] < rows).all()


def test_only_pairs_see_the_entries_of_others() -> None:
    assert tasks.training_batch(5, 6, 128, 128, "prp")["decoy"].tolist() == [2, 1, 3, 5, 4, 0]


def test_held_out_word_problems_never_appear_in_training() -> None:
    rng = Random(0)
    training = {problems.split_problem(rng, held_out=False)[0] for _ in range(2000)}
    held_out = {turn.prompt for turn in testset.test_problems("arithmetic", 50)}
    assert not training & held_out


def test_word_problems_end_in_the_right_number() -> None:
    rng = Random(1)
    for _ in range(200):
        _, answer, result = problems.problem(rng)
        assert answer.endswith(f"#### {result}") and result >= 0


def test_far_problems_keep_their_distances() -> None:
    for task in ("pairs", "recall"):
        for turn in testset.test_problems(task, 20):
            ids = tasks.prompt_ids(turn)
            key = tasks.encode(turn.answer)[: turn.known]
            at = next(i for i in range(len(ids)) if ids[i : i + len(key)] == key)
            assert 500 <= len(ids) <= 4000 and len(ids) - at > 128
            assert task != "pairs" or at % 2 == 1
    for turn in testset.test_problems("copy", 20):
        ids = tasks.prompt_ids(turn)
        first = tasks.encode(turn.answer)[0]
        distance = len(ids) - 1 - max(i for i, token in enumerate(ids) if token == first)
        assert 64 <= distance <= 127


def test_committed_problems_are_what_the_command_writes(tmp_path) -> None:
    testset.write(tmp_path)
    for task in tasks.TASKS:
        assert (tmp_path / f"{task}.jsonl").read_bytes() == (PROBLEMS / f"{task}.jsonl").read_bytes(), task


def test_equal_scores_are_taken_from_the_left() -> None:
    score = torch.tensor([[0.0, 2.0, 0.0, 0.0, -torch.inf], [-torch.inf, -torch.inf, 1.0, -torch.inf, 0.0]])
    expected = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 0, 1]]).bool()
    assert torch.equal(largest(score, 3), expected)


def test_one_blow_up_is_undone_and_a_lasting_rise_is_accepted() -> None:
    assert judged(0.1, math.inf) == (False, 0.1)
    assert judged(0.12, 0.1) == (False, pytest.approx(0.11))
    assert judged(3.0, 0.1) == (True, math.inf)
    assert judged(math.nan, 0.1)[0] and judged(math.nan, math.inf)[0] and judged(math.inf, math.inf)[0]
    assert judged(3.0, math.inf) == (False, 3.0)


@pytest.mark.parametrize("stage", [1, 2])
def test_one_step_in_every_phase_changes_all_parameters_by_finite_amounts(tmp_path, stage: int) -> None:
    _, config, mapping = prepare(tmp_path, small=True)
    steps = [schedule(stage, s, 40, True, torch.float32) for s in range(40)]
    phases = {s.mode: s.batch for s in steps}
    wanted = [replace(batch, shape=Shape(3, 160)) for batch in phases.values()]
    with torch.enable_grad():
        trainer = Trainer(Miniature(config), graphs=False, stage=stage)
        trainer.optimiser.rate.fill_(0.01)
        before = {n: p.detach().clone() for n, p in trainer.model.parameters_by_name.items()}
        for mode, batch in zip(phases, batches(config, mapping, wanted, 1, 0, False), strict=True):
            trainer.step(batch, (wanted[0].shape, mode))
    for name, parameter in trainer.model.parameters_by_name.items():
        assert parameter.isfinite().all(), name
        assert not torch.equal(parameter, before[name]), name
