"""A LoRA adapter of the tiny model."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kvik.demo.checkpoint import SPEC

ADAPTED = "adapted"  # its name
RANK = 8


def write_adapter(folder: Path, seed: int = 9) -> Path:
    """Write one for the attention, with random weights, large enough to change what the model says."""
    folder.mkdir()
    hidden, random = int(SPEC["hidden_size"]), np.random.default_rng(seed)
    sizes = {"q_proj": hidden, "v_proj": int(SPEC["num_key_value_heads"]) * int(SPEC["head_dim"])}
    weights = {}
    for layer in range(int(SPEC["num_hidden_layers"])):
        for name, size in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, hidden)), ("B", (size, RANK))):
                values = random.standard_normal(shape) * 0.1
                weights[f"{place}.lora_{part}.weight"] = values.astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 16,
        "target_modules": sorted(sizes),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
