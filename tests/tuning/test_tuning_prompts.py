"""The packaged prompts, and prompts of one's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tuning.prompts import Prompt, PromptError, balanced, load_prompts

SEED = {
    "Write a Python quicksort with detailed comments.",
    "Explain how a hash table works.",
    "Write a function to reverse a linked list.",
}


def test_packaged_prompts_hold_the_seeds_and_more() -> None:
    prompts = load_prompts()
    assert {prompt.text for prompt in prompts if prompt.category == "seed"} == SEED
    others = [prompt for prompt in prompts if prompt.category != "seed"]
    assert len(others) >= 9
    assert len({prompt.category for prompt in others}) >= 3
    assert len({prompt.text for prompt in prompts}) == len(prompts)


def test_file_of_texts_and_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "p.yml"
    path.write_text("- plain text\n- {id: mine, category: code, text: other}\n")
    assert load_prompts(path) == [
        Prompt(id="p001", category="custom", text="plain text"),
        Prompt(id="mine", category="code", text="other"),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "expected a list"),
        ("[]", "expected a list"),
        ("a: b", "expected a list"),
        ("- [x", "neither YAML nor JSON"),
        ("- ok\n- {id: x, category: c}", "prompt 2: text: Field required"),
        ("- 7", "prompt 1"),
        ("- ''", "prompt 1: text"),
        ("- {id: 'a/b', category: c, text: t}", "prompt 1: id"),
        ("- {id: a, category: c, text: t, weight: 2}", "prompt 1: weight"),
        ("- {id: a, category: c, text: t}\n- {id: a, category: c, text: u}", "two prompts have the id 'a'"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "p.yml"
    path.write_text(content)
    with pytest.raises(PromptError, match=said):
        load_prompts(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"nope\.json can't be read: .*; check sweep_prompts"):
        load_prompts(tmp_path / "nope.json")


def test_limit_keeps_categories_balanced_and_the_order() -> None:
    prompts = [Prompt(id=f"{c}{n}", category=c, text="t") for c in "abc" for n in range(3)]
    assert [prompt.id for prompt in balanced(prompts, 5)] == ["a0", "a1", "b0", "b1", "c0"]
    assert balanced(prompts, 0) == prompts
    assert balanced(prompts, 99) == prompts
    assert set(Counter(prompt.category for prompt in load_prompts(limit=4)).values()) == {1}
    with pytest.raises(PromptError, match="sweep_prompt_limit"):
        balanced(prompts, -1)
