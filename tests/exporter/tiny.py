"""Small random models of transformers, one of each family that is met here, in their folders."""

from pathlib import Path
from typing import Any

import torch
import transformers

SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
NARROW = {
    "vocab_size": 60,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": (
        "gpt2",
        {"vocab_size": 60, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2},
    ),
    "LlamaForCausalLM": ("llama", SMALL),
    "Qwen3ForCausalLM": ("qwen3", {**SMALL, "head_dim": 8}),
    "MixtralForCausalLM": ("mixtral", {**SMALL, "num_local_experts": 2}),
    "MambaForCausalLM": (
        "mamba",
        {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    ),
    "T5ForConditionalGeneration": (
        "t5",
        {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
    ),
    "BartForConditionalGeneration": ("bart", {**NARROW, "max_position_embeddings": 32}),
    "WhisperForConditionalGeneration": (
        "whisper",
        {**NARROW, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 12},
    ),
}
DECODERS = tuple(MODELS)
MODELS |= {
    "BertForSequenceClassification": ("bert", {**SMALL, "num_labels": 3}),
    "RobertaForMaskedLM": ("roberta", {**SMALL, "pad_token_id": 1, "type_vocab_size": 1}),
    "ViTForImageClassification": ("vit", {**SMALL, "image_size": 16, "patch_size": 8}),
    "VideoMAEForVideoClassification": (
        "videomae",
        {**SMALL, "image_size": 16, "patch_size": 8, "num_frames": 4},
    ),
    "SegformerForSemanticSegmentation": (
        "segformer",
        {
            "hidden_sizes": [8, 8, 8, 8],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 1, 1],
            "decoder_hidden_size": 8,
        },
    ),
    "Wav2Vec2ForCTC": (
        "wav2vec2",
        {
            **SMALL,
            "conv_dim": [8, 8],
            "conv_stride": [10, 8],
            "conv_kernel": [10, 8],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    "ASTForAudioClassification": (
        "audio-spectrogram-transformer",
        {**SMALL, "patch_size": 8, "max_length": 32, "num_mel_bins": 16},
    ),
    "PatchTSTForPrediction": (
        "patchtst",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 8,
        },
    ),
    "CLIPModel": (
        "clip",
        {
            "projection_dim": 8,
            "text_config": {**SMALL, "projection_dim": 8, **TOKENS},
            "vision_config": {**SMALL, "image_size": 16, "patch_size": 8, "projection_dim": 8},
        },
    ),
}


def save(folder: Path, name: str) -> Path:
    """Write the folder of a small random model, as `save_pretrained` does."""
    kind, values = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**TOKENS, **values})
    getattr(transformers, name)(config).eval().save_pretrained(folder)
    return folder
