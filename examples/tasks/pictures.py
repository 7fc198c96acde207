"""Make folders like those of Hugging Face for pictures: a vision transformer and a CLIP, tiny.

Run from the repository's folder: `python -m examples.tasks.pictures FOLDER`. It writes FOLDER/vit
and FOLDER/clip with `config.json`, `model.safetensors` and `preprocessor_config.json`, and the
tokenizer of the second. The weights are random: paths are those of real models, answers mean
nothing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPConfig, CLIPModel, ViTConfig, ViTModel

from examples.minilm.make import train_tokenizer

TEXTS = ("a circle", "a red square", "two blue circles", "nothing but noise")
SEED = 0
COLOURS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


def make(folder: Path) -> dict[str, Path]:
    """Write the two folders; return name → folder."""
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer(TEXTS)
    end = tokenizer.token_to_id("[SEP]")
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 64}  # fmt: skip
    picture = {**small, "image_size": 32, "patch_size": 8}
    text = {**small, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 16,
            "eos_token_id": end, "bos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    clip = CLIPConfig(text_config=text, vision_config=picture, projection_dim=16)
    processors = {
        "vit": {"image_processor_type": "ViTImageProcessor", "do_resize": True, "resample": 2,
                "size": {"height": 32, "width": 32}, **COLOURS},
        "clip": {"image_processor_type": "CLIPImageProcessor", "do_resize": True, "resample": 3,
                 "size": {"shortest_edge": 32}, "do_center_crop": True,
                 "crop_size": {"height": 32, "width": 32}, **COLOURS},
    }  # fmt: skip
    for name, model in (("vit", ViTModel(ViTConfig(**picture))), ("clip", CLIPModel(clip))):
        model.save_pretrained(folder / name)
        processor = json.dumps(processors[name])
        (folder / name / "preprocessor_config.json").write_text(processor)
    tokenizer.save(str(folder / "clip" / "tokenizer.json"))
    return {name: folder / name for name in processors}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
