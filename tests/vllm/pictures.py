"""A tiny model that sees images (LLaVA) with random weights, and requests with images of noise."""

import base64
import io
import random
import string
import sys
from dataclasses import dataclass
from pathlib import Path

from kvik.demo.checkpoint import FIRST_BYTE_TOKEN, SEED, SPEC, made_once, write_tokenizer

SIDE, PATCH = 64, 8  # pixels
IMAGE_TOKENS = (SIDE // PATCH) ** 2
IMAGE_TOKEN = "<image>"  # noqa: S105 - no password
IMAGE_TOKEN_ID = FIRST_BYTE_TOKEN + 256
VISION: dict[str, int | str | float] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "projection_dim": 64,
    "initializer_range": 0.15,
}
# Parts in the order in which they were written, and nothing between them.
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def ensure_seeing() -> Path:
    """The folder of the model; made when it is not there yet."""
    return made_once("tiny-llava", [SPEC, VISION, SEED, TEMPLATE], __name__)


def write_seeing(folder: Path) -> None:
    """Write configuration, weights, tokenizer and image processor into an existing folder."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoTokenizer,
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    torch.manual_seed(SEED)
    text = LlamaConfig(**SPEC, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION), text_config=text, image_token_index=IMAGE_TOKEN_ID
    )
    model = LlavaForConditionalGeneration(config).to(torch.float32)
    model.save_pretrained(folder)
    # vLLM 0.32 reads the names that transformers gave before its version 5.
    weights, tower = load_file(folder / "model.safetensors"), "vision_tower."
    renamed = {name.replace(tower, f"{tower}vision_model.", 1): value for name, value in weights.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, [IMAGE_TOKEN], TEMPLATE)
    size = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size),
        AutoTokenizer.from_pretrained(folder),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)


@dataclass(frozen=True)
class Picture:
    """An image of a prompt; all are of one size. uuid: what its client calls it."""

    seed: int
    uuid: str | None = None

    def part(self) -> dict[str, object]:
        """Of a message."""
        told: dict[str, object] = {"type": "image_url", "image_url": {"url": _png(self.seed)}}
        return told if self.uuid is None else told | {"uuid": self.uuid}


def text_of(length: int, seed: int) -> str:
    """So many random letters: a token each."""
    return "".join(random.Random(seed).choices(string.ascii_letters, k=length))


def message(*parts: str | Picture) -> list[dict[str, object]]:
    """The messages of a request with these parts in this order."""
    told = [{"type": "text", "text": part} if isinstance(part, str) else part.part() for part in parts]
    return [{"role": "user", "content": told}]


def tokens_in(*parts: str | Picture) -> int:
    """How many tokens that is."""
    return sum(len(part) if isinstance(part, str) else IMAGE_TOKENS for part in parts)


def _png(seed: int) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), random.Random(seed).randbytes(3 * SIDE**2)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


if __name__ == "__main__":
    write_seeing(Path(sys.argv[1]))
