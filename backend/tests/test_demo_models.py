"""What the demo pair's training rests on, against Transformers and against the backend's own trees."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sglang_ddtree.tree import grow_tree
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models import convert, pipeline
from models.acceptance import tree_depth
from models.draft import Recipe
from models.generate import Decoder
from models.network import GROWTH, INNER, SHALLOW, VOCABULARY, Target
from models.pipeline import Pipeline
from models.settings import SMOKE, Settings


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(3)
    made = Target(SHALLOW)
    with torch.no_grad():
        made.head.mul_(20)  # so that one token is clearly the likeliest
    return made


def test_the_target_is_what_transformers_computes(target: Target) -> None:
    configuration = convert._configuration("Qwen3ForCausalLM", SHALLOW, INNER)
    reference = Qwen3ForCausalLM(Qwen3Config(**configuration)).eval()
    reference.load_state_dict(target.published())
    ids = torch.randint(VOCABULARY, (2, 40))
    with torch.no_grad():
        assert (target(ids) - reference(ids).logits).abs().max() < 1e-4


def test_a_grown_target_is_the_same_function(target: Target) -> None:
    ids = torch.randint(VOCABULARY, (1, 30))
    deep = target.grown()
    assert len(deep.layers) == GROWTH * len(target.layers)
    with torch.no_grad():
        assert torch.allclose(deep(ids), target(ids), atol=1e-5)


def test_decoding_step_by_step_is_the_whole_text(target: Target) -> None:
    prefixes = torch.randint(VOCABULARY, (3, 9))
    made = Decoder(target, torch.float32).continue_text(prefixes, 40)
    with torch.no_grad():
        likeliest = target(made.ids).argmax(-1)
    assert torch.equal(made.ids[:, 9:], likeliest[:, 8:-1])


def test_written_weights_are_for_everyone_to_read(target: Target, tmp_path: Path) -> None:
    weights = tmp_path / "target.safetensors"
    save_file(target.published(), weights)
    (tmp_path / "tokenizer.json").write_text("{}")
    convert.write_target(weights, tmp_path / "tokenizer.json", tmp_path / "out")
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (tmp_path / "out").iterdir())


def test_two_trainings_in_one_folder_are_refused(tmp_path: Path) -> None:
    one, other = (Pipeline(SMOKE, tmp_path / "work", tmp_path / name) for name in ("one", "other"))

    def second() -> None:
        with pytest.raises(ValueError, match="another training works in"):
            other.run(("corpus",))

    one._corpus = second  # type: ignore[method-assign]
    one.run(("corpus",))
    assert not (tmp_path / "other").exists()
    other.run(("corpus",))


def test_sampling_follows_the_temperature(target: Target) -> None:
    decoder = Decoder(target, torch.float32)
    prefix = torch.randint(VOCABULARY, (1, 9))
    torch.manual_seed(5)
    cold = decoder.continue_text(prefix.expand(20, -1), 11, 1e-4).ids
    assert torch.equal(cold, decoder.continue_text(prefix, 11).ids.expand(20, -1))
    with torch.no_grad():
        probabilities = (target(prefix)[0, -1] / 2.0).softmax(-1)
    drawn = decoder.continue_text(prefix.expand(3000, -1), 10, 2.0).ids[:, 9]
    top = probabilities.topk(5).indices
    shares = torch.stack([(drawn == token).float().mean() for token in top])
    # Five standard deviations of a share.
    error = (probabilities[top] * (1 - probabilities[top]) / 3000).sqrt()
    assert ((shares - probabilities[top]).abs() < 5 * error).all()


def test_published_and_read_again(target: Target) -> None:
    again = Target.from_published(target.published())
    for name, value in target.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_accept_lengths_worked_out_are_those_of_the_trees() -> None:
    """The deepest node of the backend's tree on the wanted text's way, for texts that follow their draft."""
    generator = torch.Generator().manual_seed(4)
    depths = set()
    for _ in range(200):
        log_probs = (torch.randn(7, 30, generator=generator) * 2).log_softmax(-1)
        wanted = torch.multinomial(log_probs.exp(), 1, generator=generator).flatten().tolist()
        tree = grow_tree(*log_probs[None].topk(12), 12)
        texts: dict[int, list[int]] = {0: []}
        for node in range(1, tree.width):
            texts[node] = [*texts[int(tree.parents[0, node])], int(tree.tokens[0, node])]
        deepest = max(len(text) for text in texts.values() if text == wanted[: len(text)])
        assert tree_depth(log_probs, wanted, 12) == deepest
        depths.add(deepest)
    assert len(depths) > 3


def test_a_stage_is_done_again_if_what_it_depends_on_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folders(settings: Settings = SMOKE) -> dict[str, Path]:
        made = Pipeline(settings, tmp_path / "work", tmp_path / "out")
        return {"target": made.target, "generated": made.generated, "other": made.other, **made.drafts}

    def changed(settings: Settings = SMOKE) -> set[str]:
        return {name for name, folder in folders(settings).items() if folder != before[name]}

    before = folders()
    assert changed() == set()
    assert changed(replace(SMOKE, weak_steps=5)) == {"draft-weak"}
    assert changed(replace(SMOKE, draft_steps=13)) == {"draft", "draft-block16"}
    assert changed(replace(SMOKE, talks=31)) == set(before)
    with monkeypatch.context() as patch:
        patch.setattr(
            pipeline, "Recipe", lambda name, block, *rest, **more: Recipe(name, min(block, 12), *rest, **more)
        )
        assert changed() == {"draft-block16"}
    drafts = {"draft", "draft-block16", "draft-weak", "draft-mismatched"}
    source = inspect.getsource
    for module, expected in (
        ("draft", drafts),
        ("generate", {"generated", *drafts}),
        ("network", set(before)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                inspect,
                "getsource",
                lambda one, module=module: source(one) + "#" * (one.__name__ == f"models.{module}"),
            )
            assert changed() == expected


MODELS = Path(__file__).resolve().parents[2] / "models"


def test_the_published_pair_has_its_check_sums_and_is_small() -> None:
    sums = dict(line.split("  ")[::-1] for line in (MODELS / "SHA256SUMS").read_text().splitlines())
    files = {path: path.read_bytes() for path in (MODELS / "demo").rglob("*") if path.is_file()}
    assert sums == {
        str(path.relative_to(MODELS)): hashlib.sha256(content).hexdigest() for path, content in files.items()
    }
    assert sum(map(len, files.values())) < 16e6


def test_the_published_pair_fits_together() -> None:
    """Whatever the training wrote: the drafts read layers that the target has, and predict its tokens."""
    demo = MODELS / "demo"
    target = json.loads((demo / "target/config.json").read_text())
    for path in sorted(demo.glob("draft*")):
        draft = json.loads((path / "config.json").read_text())
        assert max(draft["dflash_config"]["target_layer_ids"]) < target["num_hidden_layers"]
        assert (draft["vocab_size"], draft["hidden_size"]) == (target["vocab_size"], target["hidden_size"])
