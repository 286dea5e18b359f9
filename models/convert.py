"""Write the folders that SGLang and Transformers load: float16 weights, configuration, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from models.network import (
    DRAFT_INNER,
    DRAFT_LAYERS,
    EPSILON,
    HEAD,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    TAPS,
    THETA,
    VOCABULARY,
)
from models.tokens import END_OF_TEXT, END_OF_TURN, MASK, SPECIALS

_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ENDS = {"eos_token_id": END_OF_TURN, "bos_token_id": END_OF_TEXT, "pad_token_id": END_OF_TEXT}


def _configuration(architecture: str, layers: int, inner: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "torch_dtype": "float16",
        **_ENDS,
    }


def write_target(weights: Path, tokenizer: Path, folder: Path) -> None:
    """The target's folder."""
    _write(weights, _configuration("Qwen3ForCausalLM", LAYERS, INNER), folder)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    _json(_ENDS, folder / "generation_config.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[END_OF_TURN],
        "pad_token": SPECIALS[END_OF_TEXT],
        "model_max_length": 2048,
        "chat_template": _CHAT_TEMPLATE,
    }
    _json(settings, folder / "tokenizer_config.json")


def write_draft(weights: Path, block: int, folder: Path) -> None:
    """A draft's folder."""
    configuration = {
        **_configuration("DFlashDraftModel", DRAFT_LAYERS, DRAFT_INNER),
        "block_size": block,
        "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
    }
    _write(weights, configuration, folder)


def _write(weights: Path, configuration: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: value.half() for name, value in load_file(weights).items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    # It is written for its owner alone, and a service runs as another user.
    (folder / "model.safetensors").chmod(0o644)
    _json(configuration, folder / "config.json")


def _json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
