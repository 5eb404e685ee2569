"""Damaged checkpoints: never loaded with other values; the one before is taken instead."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from damaged_checkpoints import NEWER, OLDER, load_damaged, loaded, prepare, save_two, step
from torch import nn

from pycoll import PeerDiedError, SystemError, UsageError, run_ranks
from pycoll import parallel as pc
from pycoll.parallel.trainer import checkpoint, checkpoint_files, checkpoint_folders
from pycoll.parallel.trainer.checkpoint_files import DamageError, Index, Reader

SEED = int(os.environ.get("PYCOLL_TEST_SEED", "1"))


def test_damaged_checkpoints_are_skipped(tmp_path):
    """tests/fuzz/campaign.py checkpoints damages 600."""
    count = 40
    run_ranks(save_two, 2, tmp_path)
    [(skipped, wrong)] = run_ranks(load_damaged, 1, tmp_path, count, SEED * 100_000)
    assert not wrong, f"{len(wrong)} of {count}: {wrong[:5]}"
    # The rest is damage without effect, such as zeros in the place of zeros.
    assert skipped > 0.9 * count, skipped


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def test_all_ranks_take_the_checkpoint_before_if_one_rank_finds_damage(tmp_path, monkeypatch):
    """The damage is in a file, or only one rank sees it: at its check, or when it loads."""

    def damaged_for(comm, rank: int, method: str) -> None:
        original = getattr(Reader, method)

        def read(self, *args):
            if comm.rank == rank and self._folder.name == NEWER:
                raise DamageError("this rank's disk is bad")
            return original(self, *args)

        monkeypatch.setattr(Reader, method, read)

    def work(comm, case: str):
        older, _ = loaded(comm, tmp_path / OLDER)
        if case == "file":
            comm.barrier()
            if comm.rank == 0:
                flip_last_bit(tmp_path / NEWER / "rank-00001.safetensors")
            comm.barrier()
        else:
            damaged_for(comm, 1, case)
        values, texts = loaded(comm, tmp_path)
        return values == older, texts

    run_ranks(save_two, 3, tmp_path)
    for case in ("check", "whole", "file"):
        outcomes = run_ranks(work, 3, case)
        assert [is_older for is_older, _ in outcomes] == [True] * 3, case
        first, *others = [texts for _, texts in outcomes]
        assert others == [[], []], "rank 0 warns for all"
        assert len(first) == 1
        assert f"{NEWER} is skipped: " in first[0]
        assert first[0].endswith("(on rank 1)")


def test_checkpoints_that_are_all_damaged_are_an_error_and_the_model_stays(tmp_path):
    def work(comm):
        save_two(comm, tmp_path)
        flip_last_bit(tmp_path / OLDER / "rank-00000.safetensors")
        (tmp_path / NEWER / "index.json").write_text("[1, 2")
        model, optimizer = prepare(comm)
        before = pc.whole_weights(model)
        expected = r"can be read: .*step-000000002/index\.json cannot be read: JSONDecodeError"
        with pytest.warns(UserWarning, match="is skipped"), pytest.raises(UsageError) as raised:
            pc.load(tmp_path, model, optimizer)
        assert raised.match(expected)
        assert raised.match(r"step-000000001/rank-00000\.safetensors is damaged: tensor '.*' does")
        with pytest.raises(UsageError, match="rank-00000.safetensors is damaged"):
            pc.load(tmp_path / OLDER, model, optimizer)
        after = pc.whole_weights(model)
        assert all(torch.equal(before[name], after[name]) for name in before)

    run_ranks(work, 1)


def test_index_with_another_number_is_skipped(tmp_path):
    def work(comm):
        save_two(comm, tmp_path)
        older, _ = loaded(comm, tmp_path / OLDER)
        path = tmp_path / NEWER / "index.json"
        text = path.read_text()
        content = json.loads(text)
        for name in ("step", "seed", "lr", "place"):
            (line,) = [each for each in text.splitlines() if f'"{name}": ' in each]
            path.write_text(text.replace(line, line.replace('": ', '": 1')))
            assert json.loads(path.read_text()) != content, name
            values, (warning,) = loaded(comm, tmp_path)
            assert values == older, name
            assert "index.json is damaged: its content does not match its checksum" in warning

    run_ranks(work, 1)


def test_checkpoint_without_checksums_is_loaded_with_a_warning(tmp_path):
    def work(comm):
        save_two(comm, tmp_path)
        newer, texts = loaded(comm, tmp_path)
        assert texts == []
        path = tmp_path / NEWER / "index.json"
        index = json.loads(path.read_text())
        del index["crc32"]
        path.write_text(json.dumps({**index, "version": 1, "files": list(index["files"])}))
        values, (text,) = loaded(comm, tmp_path)
        assert values == newer
        assert "has no checksums, so damage is not found: save it anew" in text
        path.write_text(json.dumps({**index, "version": 3}))
        assert "has version 3, expected 1 or 2" in loaded(comm, tmp_path)[1][0]

    run_ranks(work, 1)


@pytest.mark.pure
@pytest.mark.parametrize(
    "spans, fits",
    [
        ([(0, 3), (3, 8)], True),
        ([(3, 8), (0, 3), (0, 3)], True),  # the same piece, written by two ranks
        ([(0, 4), (0, 4)], False),
        ([(0, 4), (2, 6)], False),  # as many elements as the tensor has
        ([(0, 4), (5, 8)], False),
        ([(0, 4), (4, 9)], False),
    ],
)
def test_pieces_must_cover_each_element_exactly_once(spans, fits, tmp_path):
    whole = torch.arange(9.0)
    files = {}
    for i, (start, stop) in enumerate(spans):
        place = {"shape": [2, 4], "dim": 0, "ranges": [[0, 2]], "start": start}
        path = tmp_path / f"rank-{i:05d}.safetensors"
        header = checkpoint_files.write(path, {"w": whole[start:stop]}, {"w": place})
        files[path.name] = header
    index = Index(0, 0, files, [], None, True)
    if fits:
        assert Reader(tmp_path, index).whole("w").tolist() == whole[:8].view(2, 4).tolist()
    else:
        with pytest.raises(DamageError, match="'w' in its files do not cover each element exactly"):
            Reader(tmp_path, index)


def test_rank_whose_disk_is_full_fails_all_and_leaves_nothing(tmp_path):
    def work(comm):
        model, optimizer = prepare(comm)
        step(comm, model, optimizer)
        pc.save(tmp_path, model, optimizer)
        step(comm, model, optimizer)
        if comm.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        with pytest.raises(SystemError, match="1 of 2 ranks could not write"):
            pc.save(tmp_path, model, optimizer)

    run_ranks(work, 2)
    assert [path.name for path in tmp_path.iterdir()] == [OLDER]


def test_next_save_removes_what_killed_saves_left(tmp_path):
    def work(comm):
        model, optimizer = prepare(comm)
        step(comm, model, optimizer)
        pc.save(tmp_path, model, optimizer)
        if comm.rank == 0:
            left = [".making-step-000000001", ".making-step-000000009", ".old-step-000000001"]
            for name in [*left, "step-000000000", "step-000000008"]:
                (tmp_path / name).mkdir()
                (tmp_path / name / "rank-00000.safetensors").write_bytes(b"half")
            (tmp_path / "mine.txt").write_text("not of a checkpoint")
        comm.barrier()
        step(comm, model, optimizer)
        pc.save(tmp_path, model, optimizer)

    run_ranks(work, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", OLDER, NEWER]


def test_kill_while_a_checkpoint_is_removed_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    """The index goes first, so the rest of the folder is not taken for a checkpoint."""

    def work(comm):
        save_two(comm, tmp_path)
        if comm.rank == 0:
            monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: os.kill(os.getpid(), 9))
        model, optimizer = prepare(comm)
        pc.load(tmp_path, model, optimizer)
        step(comm, model, optimizer)
        pc.save(tmp_path, model, optimizer)

    with pytest.raises(PeerDiedError):
        run_ranks(work, 2)
    assert (tmp_path / OLDER / "rank-00000.safetensors").exists()
    assert not (tmp_path / OLDER / "index.json").exists()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [NEWER, "step-000000003"]


def test_kill_while_a_checkpoint_is_replaced_leaves_the_replaced_one(tmp_path, monkeypatch):
    def replace(comm):
        model, optimizer = prepare(comm)
        pc.load(tmp_path, model, optimizer)
        original = Path.rename

        def die(self, target):
            if self.name.startswith(".making-"):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, target)

        monkeypatch.setattr(Path, "rename", die)
        pc.save(tmp_path, model, optimizer, keep=1)

    def load_and_save(comm):
        values, texts = loaded(comm, tmp_path)
        assert texts == []
        model, optimizer = prepare(comm)
        pc.load(tmp_path, model, optimizer)
        step(comm, model, optimizer)
        pc.save(tmp_path, model, optimizer)
        return values[:2]

    run_ranks(save_two, 2, tmp_path)
    with pytest.raises(PeerDiedError):
        run_ranks(replace, 2)
    assert not (tmp_path / NEWER).exists()
    assert run_ranks(load_and_save, 2) == [[{"place": 2}, 2]] * 2
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [NEWER, "step-000000003"]


def test_save_after_a_load_of_an_older_checkpoint_is_kept(tmp_path):
    def work(comm):
        save_two(comm, tmp_path)
        (tmp_path / NEWER).rename(tmp_path / "step-000000009")
        model, optimizer = prepare(comm)
        pc.load(tmp_path / OLDER, model, optimizer)
        step(comm, model, optimizer)
        pc.save(tmp_path, model, optimizer, keep=1)
        return [path.name for path in checkpoint_folders.checkpoints(tmp_path)]

    assert run_ranks(work, 1) == [[NEWER, "step-000000009"]]


def test_load_of_other_shapes_or_groups_is_an_error_on_all_ranks(tmp_path):
    def work(comm):
        save_two(comm, tmp_path)
        mesh = pc.mesh(dp=-1, comm=comm)
        wide = pc.parallelize(nn.Linear(6, 9), mesh)
        with pytest.raises(UsageError, match=r"has shape \(8, 6\) in .*, expected \(9, 6\)"):
            pc.load(tmp_path, wide)
        model = pc.parallelize(nn.Linear(6, 8), mesh)
        groups = [{"params": [each]} for each in model.parameters()]
        optimizer = pc.optimizer(torch.optim.AdamW(groups))
        with pytest.raises(UsageError, match="has 1 groups of parameters, expected 2"):
            pc.load(tmp_path, model, optimizer)

    run_ranks(work, 2)
