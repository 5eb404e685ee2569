"""Weights in the format of Hugging Face: read by parts, and written whole."""

from __future__ import annotations

import json

import pytest
import torch
from mesh_cases import in_one_world
from tiny_gpt import GPT, PLAN
from torch import nn

from pycoll import UsageError, run_ranks
from pycoll import parallel as pc

safetensors = pytest.importorskip("safetensors.torch")


def source(tie: bool) -> nn.Module:
    torch.manual_seed(5)
    model = GPT(depth=2, vocab=29, tie=tie)
    model.register_buffer("seen", torch.tensor([1.0, 2.0]))
    return model


def write(folder, tie: bool) -> dict[str, torch.Tensor]:
    """As transformers writes it: two files and an index, and a tied weight once."""
    folder.mkdir()
    state = {k: v.contiguous() for k, v in source(tie).state_dict().items()}
    if tie:
        del state["head.weight"]
    names = list(state)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, of in files.items():
        safetensors.save_file({name: state[name] for name in of}, folder / file)
    weight_map = {name: file for file, of in files.items() for name in of}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return state


def read(comm, sizes, folder, expected, tie, when, options, out=None):
    """Names of weights that differ."""
    mesh = pc.mesh(**sizes, comm=comm)
    made = []
    with torch.device("meta" if when == "meta" else "cpu"):
        if when == "meta":  # nothing makes the weights but the files
            model = GPT(depth=2, vocab=29, tie=tie)
            model.register_buffer("seen", torch.zeros(2))
        else:
            with pc.keyed_init(mesh, seed=1):
                model = GPT(depth=2, vocab=29, tie=tie)
            model.register_buffer("seen", torch.zeros(2))
    model.blocks[0].norm_1.weight.requires_grad_(False)
    model.blocks[0].up.weight.requires_grad_(False)
    if when != "after":
        assert pc.load_pretrained(model, folder) == []
    model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks", **options)
    if when == "after":
        left = pc.load_pretrained(model, folder)
        assert (left == []) == (mesh.size("pp") == 1)
    found = pc.whole_weights(model)
    made = [name for name, weight in found.items() if not torch.equal(weight, expected[name])]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            part = pc.trainer_of(model).placements[name].take(expected[name])
            made += [] if torch.equal(parameter, part) else [name]
    made += [] if model.seen.tolist() == [1.0, 2.0] else ["seen"]
    if out is not None:
        pc.save_pretrained(model, out, max_bytes=4000)
    mesh.close()
    return made


def check(tmp_path, cases) -> None:
    for tie in (False, True):
        expected = write(tmp_path / f"in-{tie}", tie)
        numbered = [
            (
                n,
                sizes,
                tmp_path / f"in-{tie}",
                expected,
                tie,
                when,
                options,
                tmp_path / f"{i}-{tie}",
            )
            for i, (n, sizes, when, options) in enumerate(cases)
        ]
        for case, wrong in zip(numbered, in_one_world(read, numbered), strict=True):
            assert not any(wrong), (case[1], case[5], wrong)
            index = json.loads((case[7] / "model.safetensors.index.json").read_text())
            assert len(set(index["weight_map"].values())) > 2
            for name, file in index["weight_map"].items():
                stored = safetensors.load_file(case[7] / file)[name]
                assert torch.equal(stored, expected[name]), name
            assert index["weight_map"].keys() == expected.keys()


def test_files_are_read_on_meta_and_written_again(tmp_path):
    check(tmp_path, [(2, {"dp": 2}, "meta", {"zero": 3}), (2, {"tp": 2}, "meta", {})])


@pytest.mark.slow
def test_files_are_read_and_written_on_every_mesh(tmp_path):
    cases = [
        (1, {}, "before", {}),
        (2, {"dp": 2}, "before", {"zero": 2}),
        (4, {"dp": 2, "tp": 2}, "after", {"zero": 3}),
        (4, {"pp": 2, "tp": 2}, "after", {"zero": 1}),
        (4, {"pp": 2, "dp": 2}, "meta", {}),
    ]
    check(tmp_path, cases)


def test_parts_alone_are_read(tmp_path, monkeypatch):
    """A rank reads its own half of a matrix that tp shares out, once."""
    from pycoll.parallel.trainer import pretrained

    expected = write(tmp_path / "in", False)

    def work(comm):
        seen = {}
        part = pretrained.Files.part

        def counted(self, name, placement):
            found = part(self, name, placement)
            seen[name] = seen.get(name, 0) + found.numel()
            return found

        monkeypatch.setattr(pretrained.Files, "part", counted)
        wrong = read(comm, {"tp": 2}, tmp_path / "in", expected, False, "meta", {})
        return wrong, seen

    for wrong, seen in run_ranks(work, 2):
        assert not wrong and seen.keys() == expected.keys()
        for name, count in seen.items():
            whole = expected[name].numel()
            if any(part in name for part in ("qkv", "up", "out.w", "down.w")):
                assert count == whole // 2, name
            elif name in ("token.weight", "head.weight"):  # 29 rows
                assert whole // 2 - 16 < count < whole // 2 + 16, name
            else:
                assert count == whole, name


def test_files_that_do_not_fit_are_refused(tmp_path):
    write(tmp_path / "in", False)
    for model, text in [
        (nn.Linear(2, 2), "the files have no 'weight', which 2 of this model's parameters lack"),
        (GPT(depth=2, vocab=28), "'token.weight' has shape .29, 16. in .* expected .28, 16."),
    ]:
        with pytest.raises(UsageError, match=text):
            pc.load_pretrained(model, tmp_path / "in")
    with pytest.raises(UsageError, match="there is no model.safetensors.index.json or"):
        pc.load_pretrained(nn.Linear(2, 2), tmp_path)
    plain = nn.Linear(16, 29, bias=False)
    left = pc.load_pretrained(plain, tmp_path / "in", rename=lambda name: f"head.{name}")
    assert "token.weight" in left and "head.weight" not in left
    assert torch.equal(plain.weight, source(False).head.weight)
