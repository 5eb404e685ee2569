"""Mistakes of a user: each raises one clear sentence."""

from __future__ import annotations

import pytest
import torch
from mesh_cases import assert_refused
from tiny_gpt import GPT, PLAN, batches
from torch import nn

from pycoll import CollectiveMismatchError, UsageError, run_ranks
from pycoll import parallel as pc


def sequence_not_divisible(mesh):
    model = pc.parallelize(GPT(), mesh, tp=PLAN, pp="blocks", sequence_parallel=True)
    model.step(torch.zeros(1, 7).long(), torch.zeros(1, 7).long(), loss=pc.cross_entropy)


def no_microbatch(mesh):
    model = pc.parallelize(GPT(), mesh)
    model.step(*next(batches(1, 2)), loss=pc.cross_entropy, microbatches=0)


def optimizer_of_another_model(mesh):
    pc.optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def parallelize(**options):
    gpt = options.pop("gpt", {})
    return lambda mesh: pc.parallelize(GPT(**gpt), mesh, **options)


def test_each_mistake_is_one_sentence_on_every_rank():
    assert_refused(
        {
            "mesh dp=3 x tp=2: multiplies to 6, but this job has 2 ranks: start 6 ranks": (
                lambda mesh: pc.mesh(dp=3, tp=2, comm=mesh.world)
            ),
            "its heads = 1 does not divide among tp=2 ranks: choose a tp that divides": (
                parallelize(gpt={"heads": 1, "dim": 8}, tp=PLAN)
            ),
            "'*.qvk' matches no layer of GPT; near names are blocks.0.qkv": (
                parallelize(tp={"*.qvk": "col"})
            ),
            "'*.qkv' is 'column', expected one of col, qkv, ": parallelize(tp={"*.qkv": "column"}),
            "layer 'blocks.0.norm_1' (LayerNorm) cannot be Row(): expected": (
                parallelize(tp={"*.norm_1": "row"})
            ),
            "layer 'token' is tied to one that the plan shares out: name both": (
                parallelize(gpt={"tie": True}, tp={"head": "vocab"})
            ),
            "sequence_parallel: needs the name of the list of blocks": (
                parallelize(tp=PLAN, sequence_parallel=True)
            ),
            "a sequence of 7 does not divide among tp=2 ranks: pad it": sequence_not_divisible,
            "zero is 4, expected 0, 1, 2 or 3": parallelize(zero=4),
            "zero_group is 2, expected a divisor of 1, the number of": parallelize(zero_group=2),
            "no schedule '1f2b': expected one of naive, gpipe, ": parallelize(schedule="1f2b"),
            "recompute: '*.attention' matches no layer of GPT": parallelize(
                recompute="*.attention"
            ),
            "recompute: there is no operator 'aten.matmull'": parallelize(
                pp="blocks", recompute=pc.Keep(("aten.matmull",))
            ),
            "microbatches is 0, expected 1 or more": no_microbatch,
            "expected a new optimizer of the parameters of one model that": (
                optimizer_of_another_model
            ),
        },
        tp=2,
    )


def test_batch_smaller_than_the_replicas_is_an_error_but_a_last_one_is_not():
    def work(comm):
        mesh = pc.mesh(comm=comm)
        small = [(torch.zeros(2, 1), torch.zeros(2))]
        with pytest.raises(UsageError, match="a batch of 2 samples is smaller than dp=3"):
            list(pc.shard(small, mesh))
        large = [(torch.zeros(4, 1), torch.zeros(4))]
        return [len(batch.x) for batch in pc.shard(large + small, mesh)]

    assert run_ranks(work, 3) == [[2, 1], [1, 1], [1, 0]]


def test_no_stages_to_cut_is_an_error():
    def work(comm):
        mesh = pc.mesh(pp=2, comm=comm)
        with pytest.raises(UsageError, match="pp=2 needs the name of the list of blocks"):
            pc.parallelize(GPT(), mesh)
        with pytest.raises(UsageError):
            pc.parallelize(GPT(depth=1), mesh, pp="blocks")

    run_ranks(work, 2)


def test_forward_that_differs_between_ranks_is_a_mismatch():
    """Tensor parallel ranks with different batches raise an error that names both, and no hang."""

    def work(comm):
        mesh = pc.mesh(tp=2, comm=comm)
        model = pc.parallelize(GPT(), mesh, tp=PLAN)
        tokens = torch.zeros(2 + comm.rank, 8).long()
        model.step(tokens, tokens, loss=pc.cross_entropy)

    for error in run_ranks(work, 2, return_errors=True):
        assert isinstance(error, CollectiveMismatchError)
        assert "all_reduce(shape (2, 8, 16)" in str(error)
        assert "all_reduce(shape (3, 8, 16)" in str(error)
