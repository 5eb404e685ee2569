"""Modules placed on ranks by name: towers that run at the same time, equal to one process."""

from __future__ import annotations

import random
from contextlib import closing

import pytest
import torch
from mesh_cases import (
    assert_equal_one_process,
    assert_refused,
    differences,
    fit,
    in_one_world,
)
from placed_models import Mixed, Towers, Web
from torch import nn
from torch.nn import functional

import pycoll
from pycoll import UsageError, run_ranks
from pycoll import parallel as pc
from pycoll.parallel.features.place.places import ModulePlaces
from pycoll.parallel.features.place.segments import segments_of

PLACE = {"tower_a": 0, "tower_b": 1}


def web_place(seed: int, world: int, count: int = 9) -> dict[str, int]:
    draw = random.Random(seed)
    ranks = [*range(world), *(draw.randrange(world) for _ in range(count - world))]
    draw.shuffle(ranks)
    return {f"parts.{i}": rank for i, rank in enumerate(ranks)}


def sum_of_both(out, y):
    a, b = functional.cross_entropy(out["a"], y), functional.cross_entropy(out["b"], y)
    return a + 0.5 * b


def batches(count: int = 3, size: int = 7):
    draw = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(size, 6, generator=draw, dtype=torch.float64),
            torch.randint(5, (size,), generator=draw),
        )
        for _ in range(count)
    ]


def train(comm, sizes, *, make=Towers, args=(), drop=0.0, extra=False, **options):
    data = batches()
    if make is Towers:
        args = (drop,)
    if extra:
        data = [((x, x.cos()), y) for x, y in data]
    return fit(comm, sizes, lambda: make(*args), data, **options)


def test_placed_models_equal_one_process():
    """Six trainings on up to four ranks, and one process for each of four setups: seconds."""
    dropping = {"drop": 0.3}
    mixed = {"make": Mixed, "loss": sum_of_both, "microbatches": 1}
    on_two = {"inner.lstm": 1, "norm|twice": 0, "head|tied": 1}
    assert_equal_one_process(
        train,
        [
            ({"pp": 2}, {"place": PLACE}),
            ({"pp": 2}, {"place": {"tower_a": 1, "head": 1}, "microbatches": 5}, dropping),
            ({"pp": 2, "dp": 2}, {"place": PLACE}, dropping),
            ({"pp": 2, "dp": 2}, {"place": PLACE, "zero": 2, "bucket_mb": 0.0001}),
            ({"pp": 2}, {"place": on_two}, mixed),
            ({"pp": 2, "dp": 2}, {"place": on_two, "zero": 1}, {**mixed, "extra": True}),
        ],
    )


def test_random_graphs_on_random_ranks_equal_one_process():
    """Four trainings on up to four ranks: seconds."""
    cases = [
        ({"pp": world}, {"place": web_place(seed, world), "microbatches": 3}, {"args": (seed,)})
        for seed in (1, 2)  # in graph 1 a module leads to no loss
        for world in (2, 4)
    ]
    assert_equal_one_process(train, cases, make=Web)


@pytest.mark.pure
def test_segments_send_at_their_end_what_later_ones_receive_at_their_start():
    for seed in range(20):
        places = ModulePlaces(Web(seed, 20), web_place(seed, 4, 20), 4)
        graph = places.tracer.first(training=True)
        found = segments_of(graph, places.ranks(graph))
        nodes = [node for segment in found.segments for node in segment.nodes]
        nodes += [node for node in graph.nodes if found.ranks[node] is None]
        assert sorted(nodes, key=found.numbers.get) == list(graph.nodes)
        here: dict[int, set] = {rank: set() for rank in range(4)}
        sent: set = set()
        for segment in found.segments:
            assert sent.issuperset(segment.arrives)
            here[segment.rank].update(segment.arrives)
            for node in segment.nodes:
                needed = [n for n in node.all_input_nodes if found.ranks[n] is not None]
                assert here[segment.rank].issuperset(needed)
                here[segment.rank].add(node)
                if found.users(node):
                    assert node is segment.nodes[-1]
                    sent.add(node)


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        comm.barrier()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.comm.barrier()
        return gradient, None


class Meeting(nn.Linear):
    """Goes on when the other tower is here, too, in both passes."""

    comm = None

    def forward(self, x):
        return _Meet.apply(super().forward(x), type(self).comm)


def test_towers_run_at_the_same_time_in_both_passes():
    def work(comm):
        Meeting.comm = comm.split(0)
        model = Towers()
        model.tower_a[3], model.tower_b[3] = Meeting(8, 8), Meeting(8, 4)
        mesh = pc.mesh(pp=2, comm=comm)
        model = pc.parallelize(model.double(), mesh, place=PLACE)
        for x, y in batches():
            model.step(x, y, loss=pc.cross_entropy, microbatches=2)
        return True

    assert run_ranks(work, 2) == [True, True]  # a tower that waits for the other one hangs


def test_mistakes_are_refused_in_one_sentence():
    def value_dependent(self, x):
        return (
            self.head(torch.cat([self.tower_a(self.stem(x))] * 2, -1)[:, :12]) if x.sum() > 0 else x
        )

    def dropping(self, x):
        return functional.dropout(Towers.forward(self, x), 0.5, self.training)

    def in_place(self, x):
        return Towers.forward(self, x.mul_(2))

    def of(forward):
        return type("Odd", (Towers,), {"forward": forward})()

    def place(where, model=None, **options):
        return lambda mesh: pc.parallelize(model or Towers(), mesh, place=where, **options)

    def on(axis):
        def mistake(mesh):
            with closing(pc.mesh(**{axis: 2}, comm=mesh.world.split(0))) as other:
                place({"tower_b": 0})(other)

        return mistake

    tied = Towers()
    tied.tower_b[0].weight = tied.tower_a[0].weight
    listed = Towers()
    listed.extra = nn.Linear(2, 2)
    one = "place does not go with "
    assert_refused(
        {
            "place: 'tower_c' matches no module of Towers; near names are tower_": place(
                {"tower_c": 1}
            ),
            "place: 'tower_b' is on rank 2, expected 0 to 1: pp=2": place({"tower_b": 2}),
            "place: 'tower_a' is on ranks 0 and 1: give one": place({"tower_a": 0, "tower_*": 1}),
            "does not call 'extra': leave it out": place({"tower_b": 1, "extra": 1}, listed),
            "rank 0 of pp=2 has no parameter that learns": place({"stem|tower_?|head": 1}),
            "Odd cannot be traced: symbolically traced variables cannot be used as inputs to "
            "control flow (test_place.py:": place(PLACE, of(value_dependent)),
            "calls dropout between modules": place(PLACE, of(dropping)),
            "calls mul_ between modules, which writes in place": place(PLACE, of(in_place)),
            "tower_a on rank 0 and tower_b on rank 1 have one parameter, tower_a.0.weight": place(
                PLACE, tied
            ),
            one + "pp='...', which cuts a list of blocks": place(PLACE, pp="tower_a"),
            one + "a tp plan": place(PLACE, tp={"head": "col"}),
            one + "zero=3": place(PLACE, zero=3),
            one + "recompute": place(PLACE, recompute="tower_a"),
            one + "precision": place(PLACE, precision="bf16"),
            one + "a schedule": place(PLACE, schedule="gpipe"),
            **{f"{one}{axis} > 1": on(axis) for axis in ("tp", "cp", "ep")},
        },
        pp=2,
    )


def test_placed_models_evaluate_save_and_load(tmp_path):
    def work(comm, sizes, place):
        mesh = pc.mesh(**sizes, comm=comm)
        with pc.keyed_init(mesh, seed=1):
            model = Towers().double()
        model = pc.parallelize(model, mesh, place=place)
        optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        data = list(pc.shard(batches(4), mesh))
        for i, (x, y) in enumerate(data):
            model.step(x, y, loss=pc.cross_entropy)
            optimizer.step()
            if i == 1 and place:
                pc.save(tmp_path / "saved", model, optimizer)
        right = lambda out, y: ((out.argmax(-1) == y).sum(), len(y))  # noqa: E731
        scores = model.evaluate(*data[0], loss=pc.cross_entropy, metrics={"right": right})
        before = pc.whole_weights(model)
        if place:
            for call in (
                lambda: model(data[0][0]),
                lambda: pc.cross_entropy(model(data[0][0]), data[0][1]),
            ):
                with pytest.raises(UsageError, match="this rank has only a stage of the model"):
                    call()
        pc.load(tmp_path / "saved", model, optimizer)
        for x, y in data[2:]:
            model.step(x, y, loss=pc.cross_entropy)
            optimizer.step()
        return scores, before, pc.whole_weights(model)

    cases = [(2, {"pp": 2}, PLACE), (1, {}, None)]
    placed, (alone,) = in_one_world(work, cases[:1])[0], in_one_world(work, cases[1:])[0]
    for found in (*placed, alone):
        assert not list(differences(alone[:2], found[:2]))
        assert not list(differences(alone[1], found[2]))  # the last steps again


def test_modules_that_write_into_what_others_read_are_refused():
    def work(comm, first):
        model = Towers()
        setattr(model, first, nn.Sequential(nn.ReLU(inplace=True), getattr(model, first)))
        model = pc.parallelize(model.double(), pc.mesh(pp=2, comm=comm), place=PLACE)
        (x, y), *_ = batches()
        try:
            model.step(x, y, loss=pc.cross_entropy)
        except pycoll.Error as error:
            return str(error)

    for first in ("stem", "tower_b"):
        texts = run_ranks(work, 2, first)
        assert any(f"place: {first} writes in place" in text for text in texts), texts
