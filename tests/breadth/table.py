"""The architectures of the matrix: where each comes from, how it is saved, what it takes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

HERE = Path(__file__).parent / "models"
FILES = ("nets", "lit")
"""Files beside this one, as a user's own."""
B = "batch=1..3"


@dataclass(frozen=True)
class Case:
    """One architecture, and the command that its user would write."""

    name: str
    model: str
    """As `--model` takes it; for a Hugging Face folder, `transformers:Class`."""
    inputs: tuple[str, ...]
    """As `--input` takes them, with the range of integers, which the command only gets where it
    follows a dim (`<nodes`): the other ones a user would not state."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """As `--model-args`; of a Hugging Face folder, its config's values."""
    saved: str = "state dict"
    """Or `safetensors`, `folder`, `Lightning`, `module`."""
    options: tuple[str, ...] = ()
    """Further words of the command."""
    family: str = ""
    is_new: bool = False
    """Whether nobody looked at this family while the exporter was built."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """What the bare calls are given besides the inputs, as `use_cache=False`."""
    timm: str = ""
    """Its name in timm, where that is how the user names the model."""

    @property
    def library(self) -> str:
        """The family's name in the table."""
        module = self.model.partition(":")[0].partition(".")[0]
        return self.family or ("torch" if module in FILES else module)


def build(case: Case) -> nn.Module:
    """Build a case's network, in evaluation mode, its weights as the library draws them."""
    module_name, _, name = case.model.rpartition(":")
    if module_name == "timm":
        import timm

        network: nn.Module = timm.create_model(name, **case.args)
        return network.eval()
    if module_name == "transformers":
        return _hugging_face(name, case.args).eval()
    made: nn.Module = getattr(_module(module_name), name)(**case.args)
    return made.eval()


def _module(name: str) -> Any:
    if name not in FILES:
        return importlib.import_module(name)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _hugging_face(name: str, values: Mapping[str, Any]) -> nn.Module:
    import transformers

    cls = getattr(transformers, name)
    made: nn.Module = cls(cls.config_class(**values))
    return made


def hf(name: str, cls: str, *inputs: str, **values: Any) -> Case:
    options = values.pop("options", ())
    call = {"use_cache": False} if values.pop("decodes", False) else {}
    return Case(
        f"hf_{name}",
        f"transformers:{cls}",
        inputs,
        values,
        "folder",
        options,
        call=call,
    )


def timm(name: str, size: int) -> Case:
    inputs = (f"x:float32[{B},3,{size},{size}]",)
    return Case(f"timm_{name}", f"timm:{name}", inputs, {"num_classes": 10}, timm=name)


def net(name: str, factory: str, *inputs: str, **rest: Any) -> Case:
    return Case(name, f"nets:{factory}", inputs, **rest)


IDS = f"input_ids:int64[{B},length=2..16]<100"
MASK = f"attention_mask:int64[{B},length=2..16]<2"
WORDS: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
PIXELS = f"pixel_values:float32[{B},3,32,32]"
GRAPH = ("x:float32[nodes=10..40,8]", "edge_index:int64[2,edges=5..90]<nodes")

IMAGE = {**WORDS, "image_size": 32, "patch_size": 8}
del IMAGE["vocab_size"]
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
BART = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
TARGET = f"decoder_input_ids:int64[{B},answer=2..8]<100"
WAVE = f"input_values:float32[{B},samples=2000..8000]"
SOUNDS = {
    **WORDS,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}

HUGGING_FACE = (
    hf("bert", "BertForSequenceClassification", IDS, MASK, **WORDS),
    hf(
        "roberta",
        "RobertaForSequenceClassification",
        IDS,
        MASK,
        **WORDS | {"vocab_size": 4000, "hidden_size": 64},
        max_position_embeddings=515,
    ),
    hf(
        "distilbert_tok",
        "DistilBertForTokenClassification",
        IDS,
        MASK,
        vocab_size=100,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
    ),
    hf("albert_qa", "AlbertForQuestionAnswering", IDS, MASK, **WORDS, embedding_size=16),
    hf("deberta_v2", "DebertaV2ForSequenceClassification", IDS, MASK, **WORDS),
    hf(
        "modernbert",
        "ModernBertForMaskedLM",
        IDS,
        MASK,
        **WORDS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    hf(
        "xlnet",
        "XLNetForSequenceClassification",
        IDS,
        vocab_size=100,
        d_model=32,
        n_layer=2,
        n_head=4,
        d_inner=64,
    ),
    hf(
        "longformer",
        "LongformerForSequenceClassification",
        IDS,
        MASK,
        **WORDS,
        attention_window=[4, 4],
        pad_token_id=0,
    ),
    hf(
        "gpt2", "GPT2LMHeadModel", IDS, vocab_size=100, n_embd=32, n_layer=2, n_head=4, decodes=True
    ),
    hf("llama", "LlamaForCausalLM", IDS, MASK, **WORDS, num_key_value_heads=2, decodes=True),
    hf("qwen3", "Qwen3ForCausalLM", IDS, **WORDS, num_key_value_heads=2, head_dim=8, decodes=True),
    hf(
        "mixtral_moe",
        "MixtralForCausalLM",
        IDS,
        **WORDS,
        num_key_value_heads=2,
        num_local_experts=4,
        decodes=True,
    ),
    hf("mamba", "MambaForCausalLM", IDS, **WORDS, decodes=True),
    hf("t5_encoder", "T5EncoderModel", IDS, MASK, **T5),
    hf("t5_seq2seq", "T5ForConditionalGeneration", IDS, TARGET, **T5, decodes=True),
    hf("bart", "BartForConditionalGeneration", IDS, TARGET, **BART, decodes=True),
    hf("vit", "ViTForImageClassification", PIXELS, **IMAGE),
    hf(
        "vit_dynsize",
        "ViTForImageClassification",
        f"pixel_values:float32[{B},3,h=32..64/8,w=32..64/8]",
        **IMAGE,
    ),
    hf(
        "swin",
        "SwinForImageClassification",
        PIXELS,
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=4,
    ),
    hf(
        "convnextv2",
        "ConvNextV2ForImageClassification",
        PIXELS,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
    ),
    hf(
        "segformer_dynsize",
        "SegformerForSemanticSegmentation",
        f"pixel_values:float32[{B},3,h=64..96/32,w=64..96/32]",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[4, 2],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
    ),
    hf("siglip_vision", "SiglipVisionModel", PIXELS, **IMAGE),
    hf(
        "clip",
        "CLIPModel",
        "input_ids:int64[texts=1..3,8]<100",
        "pixel_values:float32[images=1..3,3,32,32]",
        text_config={**WORDS, "max_position_embeddings": 16, "eos_token_id": 99},
        vision_config=IMAGE,
        projection_dim=16,
    ),
    hf(
        "detr",
        "DetrForObjectDetection",
        f"pixel_values:float32[{B},3,64,64]",
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=5,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config={
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
            "out_features": ["stage2"],
        },
    ),
    hf("wav2vec2_ctc", "Wav2Vec2ForCTC", WAVE, **SOUNDS),
    hf(
        "whisper_enc_dec",
        "WhisperForConditionalGeneration",
        f"input_features:float32[{B},16,60]",
        TARGET,
        **BART,
        num_mel_bins=16,
        max_source_positions=30,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        decodes=True,
    ),
    hf(
        "encodec",
        "EncodecModel",
        f"input_values:float32[{B},1,2400]",
        num_filters=4,
        upsampling_ratios=[4, 2],
        hidden_size=16,
        codebook_size=16,
        codebook_dim=16,
        target_bandwidths=[12.0],
    ),
    hf(
        "vits_tts",
        "VitsModel",
        f"input_ids:int64[{B},length=4..12]<38",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        flow_size=32,
        spectrogram_bins=33,
        upsample_initial_channel=32,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        prior_encoder_num_flows=2,
    ),
    hf(
        "patchtst",
        "PatchTSTForPrediction",
        f"past_values:float32[{B},32,3]",
        num_input_channels=3,
        context_length=32,
        prediction_length=8,
        patch_length=8,
        patch_stride=8,
        d_model=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
    ),
)

VISION = (
    timm("resnet18", 64),
    Case(
        "timm_resnet18_dynsize",
        "timm:resnet18",
        (f"x:float32[{B},3,h=64..128/32,w=64..128/32]",),
        {"num_classes": 10},
        timm="resnet18",
    ),
    timm("mobilenetv3_small_050", 64),
    timm("ghostnet_100", 64),
    timm("convnext_atto", 64),
    timm("nf_regnet_b0", 64),
    timm("edgenext_xx_small", 64),
    timm("mobilevit_xxs", 64),
    timm("vit_tiny_patch16_224", 224),
    timm("swin_tiny_patch4_window7_224", 224),
    timm("maxvit_rmlp_pico_rw_256", 256),
    Case(
        "vitpytorch_SimpleViT",
        "vit_pytorch:SimpleViT",
        (f"img:float32[{B},3,32,32]",),
        {
            "image_size": 32,
            "patch_size": 8,
            "num_classes": 5,
            "dim": 32,
            "depth": 2,
            "heads": 4,
            "mlp_dim": 64,
        },
    ),
    net(
        "efficientnet_pytorch",
        "efficientnet",
        f"inputs:float32[{B},3,64,64]",
        family="efficientnet_pytorch",
    ),
    Case(
        "smp_Unet",
        "segmentation_models_pytorch:Unet",
        (f"x:float32[{B},3,64,64]",),
        {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2},
    ),
    Case(
        "smp_Segformer",
        "segmentation_models_pytorch:Segformer",
        (f"x:float32[{B},3,64,64]",),
        {"encoder_name": "mit_b0", "encoder_weights": None, "classes": 2},
    ),
    net("nms_like", "NmsLike", "image:float32[1,3,64,64]"),
    Case(
        "monai_UNet",
        "monai.networks.nets:UNet",
        (f"x:float32[{B},1,32,32]",),
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 2,
            "channels": [8, 16, 32],
            "strides": [2, 2],
            "num_res_units": 1,
        },
    ),
    Case(
        "monai_SegResNet",
        "monai.networks.nets:SegResNet",
        (f"x:float32[{B},1,32,32,32]",),
        {"spatial_dims": 3, "init_filters": 8, "in_channels": 1, "out_channels": 2},
    ),
    Case(
        "monai_DynUNet",
        "monai.networks.nets:DynUNet",
        (f"x:float32[{B},1,32,32]",),
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 2,
            "kernel_size": [3, 3, 3],
            "strides": [1, 2, 2],
            "upsample_kernel_size": [2, 2],
        },
    ),
    Case(
        "monai_SwinUNETR",
        "monai.networks.nets:SwinUNETR",
        (f"x_in:float32[{B},1,64,64]",),
        {"in_channels": 1, "out_channels": 2, "feature_size": 12, "spatial_dims": 2},
    ),
    Case(
        "diffusers_unet",
        "diffusers:UNet2DModel",
        (f"sample:float32[{B},3,16,16]", f"timestep:int64[{B}]<1000"),
        {
            "sample_size": 16,
            "block_out_channels": [16, 32],
            "norm_num_groups": 8,
            "layers_per_block": 1,
            "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
            "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
        },
        "folder",
    ),
)

OTHERS = (
    net("pyg_gcn", "Gcn", *GRAPH, family="torch_geometric"),
    net("pyg_gatv2", "GatPool", *GRAPH, "batch:int64[nodes=10..40]=0..3", family="torch_geometric"),
    net("e3nn_tp", "Equivariant", f"x:float32[{B},10]", f"vector:float32[{B},3]", family="e3nn"),
    net(
        "ft_transformer",
        "ft_transformer",
        f"x_cont:float32[{B},4]",
        f"x_cat:int64[{B},2]<5",
        family="rtdl",
    ),
    net("rtdl_plr", "PeriodicTabular", f"x:float32[{B},7]", family="rtdl"),
    net("tabnet", "tabnet", f"x:float32[{B},10]", family="pytorch_tabnet"),
    net("dlrm", "Dlrm", f"dense:float32[{B},13]", f"sparse:int64[{B},3]<50"),
    net("fno_complex", "fno", f"x:float32[{B},1,32,32]", family="neuralop"),
    net("snn_leaky", "Snn", f"x:float32[{B},20]", family="snntorch"),
    net("ode_rk4", "ode_rk4", f"x:float32[{B},4]", family="torchdiffeq"),
    net("ode_dopri5", "ode_dopri5", f"x:float32[{B},4]", family="torchdiffeq"),
    net("vq", "Quantizer", f"x:float32[{B},6,12]", family="vector_quantize_pytorch"),
    net("vae_sampling", "Vae", f"x:float32[{B},20]"),
    net(
        "packed_lstm",
        "PackedLSTM",
        f"ids:int64[{B},length=2..12]<100",
        f"lengths:int64[{B}]=1..length",
    ),
    net("stft_crnn", "StftCrnn", f"wave:float32[{B},samples=2000..8000]"),
    net("tcn", "Tcn", f"x:float32[{B},6,length=8..40]"),
    net(
        "nn_transformer",
        "EncoderDecoder",
        f"src:int64[{B},source=2..9]<60",
        f"tgt:int64[{B},target=2..7]<60",
    ),
    net(
        "xtrans_encoder",
        "x_encoder",
        f"x:int64[{B},length=2..16]<100",
        f"mask:bool[{B},length=2..16]",
        family="x_transformers",
    ),
    net("xtrans_decoder", "x_decoder", f"x:int64[{B},length=2..16]<100", family="x_transformers"),
    net("pickle_module", "quickstart", f"input:float32[{B},1,28,28]", saved="module"),
    Case(
        "lit_hparams",
        "lit:LitNet",
        (f"x:float32[{B},12]",),
        {"hidden": 24, "n_classes": 7},
        "Lightning",
        family="lightning",
    ),
)

NEW = (
    Case("torchvision_resnet18", "torchvision.models:resnet18", (f"x:float32[{B},3,64,64]",)),
    Case(
        "torchvision_efficientnet",
        "torchvision.models:efficientnet_b0",
        (f"x:float32[{B},3,64,64]",),
    ),
    Case("torchvision_swin_v2", "torchvision.models:swin_v2_t", (f"x:float32[{B},3,64,64]",)),
    Case(
        "torchvision_deeplab",
        "torchvision.models.segmentation:deeplabv3_mobilenet_v3_large",
        (f"x:float32[{B},3,64,64]",),
        {"weights_backbone": None, "num_classes": 3},
    ),
    Case("torchvision_video", "torchvision.models.video:mc3_18", (f"x:float32[{B},3,8,32,32]",)),
    Case(
        "torchaudio_conformer",
        "torchaudio.models:Conformer",
        (f"input:float32[{B},length=8..20,16]", f"lengths:int64[{B}]=length..length"),
        {
            "input_dim": 16,
            "num_heads": 4,
            "ffn_dim": 32,
            "num_layers": 1,
            "depthwise_conv_kernel_size": 3,
        },
    ),
    Case(
        "torchaudio_wav2letter",
        "torchaudio.models:Wav2Letter",
        (f"x:float32[{B},1,samples=4000..8000]",),
        {"num_classes": 10},
    ),
    Case(
        "pytorch_tcn",
        "pytorch_tcn:TCN",
        (f"x:float32[{B},4,length=8..30]",),
        {"num_inputs": 4, "num_channels": [8, 8]},
    ),
    net(
        "conformer_block",
        "conformer",
        f"x:float32[{B},length=8..20,32]",
        family="conformer",
        saved="safetensors",
    ),
    net("perceiver", "perceiver", f"data:float32[{B},length=8..20,3]", family="perceiver_pytorch"),
    net("sentence_vectors", "SentenceVectors", IDS, MASK, family="sentence_transformers"),
    net("mel_conv", "mel_crnn", f"input:float32[{B},samples=4000..8000]", family="nnAudio"),
    net(
        "conv_tasnet",
        "ConvTasNet",
        f"wave:float32[{B},1,samples=400..800/8]",
        family="asteroid_filterbanks",
    ),
    net("kan", "kan", f"x:float32[{B},4]", family="pykan"),
    net(
        "egnn",
        "Egnn",
        f"atoms:float32[{B},count=3..9,16]",
        f"positions:float32[{B},count=3..9,3]",
        family="egnn_pytorch",
    ),
    net(
        "ddpm_unet",
        "ddpm_unet",
        f"x:float32[{B},3,16,16]",
        f"time:int64[{B}]<1000",
        family="denoising_diffusion_pytorch",
    ),
    net("mamba_py", "MambaPy", f"ids:int64[{B},length=2..12]<50", family="mambapy"),
    net("flow_maf", "Flow", f"x:float32[{B},3]", family="zuko"),
    net(
        "crf_tagger",
        "CrfTagger",
        f"ids:int64[{B},length=2..10]<80",
        f"tags:int64[{B},length=2..10]<5",
        family="torchcrf",
    ),
    net("liquid_cfc", "LiquidNet", f"x:float32[{B},12,5]", family="ncps"),
    net(
        "tab_transformer",
        "tab_transformer",
        f"x_categ:int64[{B},3]<4",
        f"x_cont:float32[{B},3]",
        family="tab_transformer_pytorch",
    ),
    net("i_transformer", "i_transformer", f"x:float32[{B},24,5]", family="iTransformer"),
    Case(
        "gmlp_vision",
        "g_mlp_pytorch:gMLPVision",
        (f"x:float32[{B},3,32,32]",),
        {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2},
    ),
    Case(
        "mlp_mixer",
        "mlp_mixer_pytorch:MLPMixer",
        (f"x:float32[{B},3,32,32]",),
        {"image_size": 32, "channels": 3, "patch_size": 8, "dim": 32, "depth": 2, "num_classes": 5},
    ),
    Case(
        "siren",
        "siren_pytorch:SirenNet",
        (f"x:float32[{B},2]",),
        {"dim_in": 2, "dim_hidden": 32, "dim_out": 3, "num_layers": 3},
    ),
    net("sb3_policy", "Policy", f"observation:float32[{B},8]", family="stable_baselines3"),
    net("lora_merged", "lora", IDS, MASK, family="peft"),
    Case(
        "linformer",
        "linformer:Linformer",
        (f"x:float32[{B},16,32]",),
        {"dim": 32, "seq_len": 16, "depth": 2, "heads": 4, "k": 8},
    ),
    Case(
        "nystromformer",
        "nystrom_attention:Nystromformer",
        (f"x:float32[{B},16,32]",),
        {"dim": 32, "dim_head": 8, "heads": 4, "depth": 1, "num_landmarks": 4},
    ),
    Case(
        "min_gru",
        "minGRU_pytorch.minLM:minLM",
        (f"x:int64[{B},length=2..12]<50",),
        {"num_tokens": 50, "dim": 32, "depth": 2},
    ),
    net("kornia_edges", "Augmented", f"image:float32[{B},3,32,32]", family="kornia"),
    net(
        "open_clip",
        "clip_open",
        f"image:float32[{B},3,32,32]",
        f"text:int64[{B},12]<100",
        family="open_clip",
    ),
    Case(
        "pyg_sage",
        "torch_geometric.nn:GraphSAGE",
        GRAPH,
        {"in_channels": 8, "hidden_channels": 16, "num_layers": 2, "out_channels": 3},
    ),
    net("pyg_links", "Sage", *GRAPH, family="torch_geometric"),
    net("pyg_gin", "Gin", *GRAPH, family="torch_geometric"),
    net(
        "two_towers",
        "TwoTowers",
        f"user:int64[{B}]<300",
        f"item:int64[{B}]<500",
        f"features:float32[{B},4]",
    ),
    net(
        "deep_sets",
        "DeepSets",
        f"points:float32[{B},count=2..9,5]",
        f"mask:float32[{B},count=2..9]",
    ),
    net("point_net", "PointNet", f"points:float32[{B},count=8..40,3]"),
    net("nerf_field", "NerfField", f"position:float32[{B},3]", f"direction:float32[{B},3]"),
    net("mixture_density", "Mixture", f"x:float32[{B},6]"),
    net("top2_experts", "ToyMoe", f"x:float32[{B},12]"),
    net("n_beats", "NBeatsLike", f"window:float32[{B},24]"),
    net("plain_rnn", "PlainRnn", f"x:float32[{B},length=2..9,4]"),
    hf("dinov2", "Dinov2ForImageClassification", PIXELS, **IMAGE),
    hf("electra", "ElectraForSequenceClassification", IDS, MASK, **WORDS, embedding_size=16),
    hf("mpnet", "MPNetForTokenClassification", IDS, MASK, **WORDS),
    hf(
        "gemma3", "Gemma3ForCausalLM", IDS, **WORDS, num_key_value_heads=2, head_dim=8, decodes=True
    ),
    hf(
        "phi3", "Phi3ForCausalLM", IDS, **WORDS, num_key_value_heads=2, pad_token_id=0, decodes=True
    ),
    hf(
        "opt",
        "OPTForCausalLM",
        IDS,
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        word_embed_proj_dim=32,
        decodes=True,
    ),
    hf(
        "bloom",
        "BloomForCausalLM",
        IDS,
        vocab_size=100,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        decodes=True,
    ),
    hf(
        "depth_anything",
        "DPTForDepthEstimation",
        PIXELS,
        **IMAGE | {"num_hidden_layers": 4},
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        is_hybrid=False,
    ),
    hf(
        "audio_ast",
        "ASTForAudioClassification",
        f"input_values:float32[{B},64,16]",
        **{k: v for k, v in IMAGE.items() if k != "image_size"},
        max_length=64,
        num_mel_bins=16,
    ),
    hf("hubert", "HubertForCTC", WAVE, **SOUNDS),
    timm("efficientvit_b0", 64),
    timm("fastvit_t8", 64),
    timm("coat_tiny", 224),
)

CASES = {
    case.name: case
    for cases, is_new in ((HUGGING_FACE, False), (VISION, False), (OTHERS, False), (NEW, True))
    for case in (replace(each, is_new=is_new) for each in cases)
}
