"""Networks as their users write them: a factory each, where a library's own class is not enough.

Modelyard is given this file as a user would give theirs: `--model nets.py:packed_lstm`.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class PackedLSTM(nn.Module):
    """Embedding and LSTM over a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.lstm = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 5)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (state, _) = self.lstm(packed)
        return self.head(torch.cat([state[0], state[1]], dim=-1))


class StftCrnn(nn.Module):
    """Spectrogram, convolution, GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(256))
        self.conv = nn.Conv1d(129, 32, 3, padding=1)
        self.gru = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 6)

    def forward(self, wave: Tensor) -> Tensor:
        spectrum = torch.stft(wave, 256, 128, window=self.window, return_complex=True).abs()
        rows, _ = self.gru(self.conv(spectrum).relu().transpose(1, 2))
        return self.head(rows)


class PlainRnn(nn.Module):
    """The first layer of any course."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows, _ = self.rnn(x)
        return self.head(rows[:, -1])


class NmsLike(nn.Module):
    """Boxes and scores; the best by a threshold and top-k."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 3, stride=4)
        self.boxes = nn.Conv2d(8, 4, 1)
        self.scores = nn.Conv2d(8, 1, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.backbone(image).relu()
        boxes = self.boxes(rows).flatten(2).transpose(1, 2)[0]
        scores = self.scores(rows).flatten().sigmoid()
        best = scores.topk(10)
        return boxes[best.indices], best.values


class Vae(nn.Module):
    """An autoencoder that samples."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(20, 16)
        self.decode = nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, dim=-1)
        return self.decode(mean + torch.randn_like(mean) * (log_variance / 2).exp())


class Dlrm(nn.Module):
    """Dense features, embedding bags, pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        rows = [self.bottom(dense)]
        rows += [bag(sparse[:, i : i + 1]) for i, bag in enumerate(self.bags)]
        table = torch.stack(rows, dim=1)
        products = torch.bmm(table, table.transpose(1, 2))
        i, j = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([rows[0], products[:, i, j]], dim=1))


class Tcn(nn.Module):
    """Dilated causal convolutions with weight norm."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(
            norm(nn.Conv1d(6 if i == 0 else 16, 16, 3, dilation=2**i)) for i in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(F.pad(x, (2 * 2**i, 0))))
        return self.head(x.transpose(1, 2))


class EncoderDecoder(nn.Module):
    """torch's own Transformer with masks, as in the tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(60, 32)
        self.target = nn.Embedding(60, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(32, 60)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        rows = self.transformer(
            self.source(src), self.target(tgt), tgt_mask=causal, tgt_is_causal=True
        )
        return self.head(rows)


class Ode(nn.Module):
    """A neural ordinary differential equation."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        self.register_buffer("times", torch.linspace(0, 1, 5))
        self.method = method

    def forward(self, x: Tensor) -> Tensor:
        from torchdiffeq import odeint

        return odeint(lambda t, y: self.field(y), x, self.times, method=self.method)[-1]


class Snn(nn.Module):
    """Leaky integrate-and-fire neurons over ten steps."""

    def __init__(self) -> None:
        super().__init__()
        import snntorch

        self.first, self.second = nn.Linear(20, 32), nn.Linear(32, 5)
        self.spike_1, self.spike_2 = snntorch.Leaky(beta=0.9), snntorch.Leaky(beta=0.9)

    def forward(self, x: Tensor) -> Tensor:
        memory_1, memory_2 = self.spike_1.init_leaky(), self.spike_2.init_leaky()
        total = 0
        for _ in range(10):
            spikes, memory_1 = self.spike_1(self.first(x), memory_1)
            spikes, memory_2 = self.spike_2(self.second(spikes), memory_2)
            total = total + memory_2
        return total


class Gcn(nn.Module):
    """Two graph convolutions: a class per node."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        self.first, self.second = GCNConv(8, 16), GCNConv(16, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class GatPool(nn.Module):
    """Graph attention, then a mean per graph of the batch."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GATv2Conv

        self.conv = GATv2Conv(8, 16, heads=2)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        return self.head(global_mean_pool(self.conv(x, edge_index).relu(), batch, 4))


class Sage(nn.Module):
    """GraphSAGE with a link score at its end."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import SAGEConv

        self.first, self.second = SAGEConv(8, 16), SAGEConv(16, 16)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = self.second(self.first(x, edge_index).relu(), edge_index)
        return (rows[edge_index[0]] * rows[edge_index[1]]).sum(dim=-1)


class Gin(nn.Module):
    """Graph isomorphism layers and a sum over the graph."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GINConv

        self.conv = GINConv(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)))
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(self.conv(x, edge_index).sum(dim=0, keepdim=True))


class Equivariant(nn.Module):
    """e3nn's tensor product with spherical harmonics."""

    def __init__(self) -> None:
        super().__init__()
        from e3nn import o3

        self.product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "4x0e + 2x1o")

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:
        from e3nn import o3

        return self.product(x, o3.spherical_harmonics("1x0e + 1x1o", vector, normalize=True))


class Quantizer(nn.Module):
    """An autoencoder with a learned codebook."""

    def __init__(self) -> None:
        super().__init__()
        from vector_quantize_pytorch import VectorQuantize

        self.encode, self.decode = nn.Linear(12, 16), nn.Linear(16, 12)
        self.codes = VectorQuantize(dim=16, codebook_size=32, decay=0.8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, codes, loss = self.codes(self.encode(x))
        return self.decode(rows), codes, loss


class PeriodicTabular(nn.Module):
    """Numbers through periodic embeddings (rtdl), then a small network."""

    def __init__(self) -> None:
        super().__init__()
        from rtdl_num_embeddings import PeriodicEmbeddings

        self.embed = PeriodicEmbeddings(7, d_embedding=8, lite=False)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(56, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


class CrfTagger(nn.Module):
    """Emissions and their normaliser under a conditional random field."""

    def __init__(self) -> None:
        super().__init__()
        from torchcrf import CRF

        self.embed = nn.Embedding(80, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.emit = nn.Linear(32, 5)
        self.crf = CRF(5, batch_first=True)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        rows, _ = self.lstm(self.embed(ids))
        return self.crf(self.emit(rows), tags, reduction="none")


class TwoTowers(nn.Module):
    """Users and items of a recommender, a score each."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(300, 16), nn.Embedding(500, 16)
        self.user, self.item = nn.Linear(16, 16), nn.Linear(20, 16)

    def forward(self, user: Tensor, item: Tensor, features: Tensor) -> Tensor:
        users = F.normalize(self.user(self.users(user)), dim=-1)
        items = F.normalize(self.item(torch.cat([self.items(item), features], dim=-1)), dim=-1)
        return (users * items).sum(dim=-1) / 0.07


class DeepSets(nn.Module):
    """Sets with a mask of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32))
        self.all = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, points: Tensor, mask: Tensor) -> Tensor:
        rows = self.each(points) * mask.unsqueeze(-1)
        return self.all(rows.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1))


class PointNet(nn.Module):
    """Points of a cloud: shared layers, a maximum, a class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1)
        )
        self.head = nn.Linear(64, 4)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.layers(points.transpose(1, 2)).amax(dim=-1))


class NerfField(nn.Module):
    """Positions and directions to colour and density."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(6) * math.pi)
        self.trunk = nn.Sequential(nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.density, self.colour = nn.Linear(64, 1), nn.Linear(67, 3)

    def forward(self, position: Tensor, direction: Tensor) -> dict[str, Tensor]:
        angles = (position[..., None] * self.bands).flatten(-2)
        rows = self.trunk(torch.cat([angles.sin(), angles.cos()], dim=-1))
        colour = self.colour(torch.cat([rows, direction], dim=-1)).sigmoid()
        return {"density": F.softplus(self.density(rows)), "colour": colour}


class Mixture(nn.Module):
    """A mixture density network."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
        self.weights, self.means, self.widths = (nn.Linear(32, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.trunk(x)
        return self.weights(rows).softmax(dim=-1), self.means(rows), F.elu(self.widths(rows)) + 1


class ToyMoe(nn.Module):
    """A mixture of experts with a top-2 gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(dim=-1).topk(2)
        spread = torch.zeros(x.shape[0], 4).scatter(1, chosen, weights)
        rows = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (rows * spread.unsqueeze(-1)).sum(dim=1)


def quickstart() -> nn.Module:
    """Layers in a row, saved whole with torch.save(model)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def ode_rk4() -> nn.Module:
    return Ode("rk4")


def ode_dopri5() -> nn.Module:
    return Ode("dopri5")


def x_encoder() -> nn.Module:
    from x_transformers import Encoder, TransformerWrapper

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = Encoder(dim=32, depth=2, heads=4)
            self.net = TransformerWrapper(num_tokens=100, max_seq_len=64, attn_layers=layers)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.net(x, mask=mask)

    return Masked()


def x_decoder() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True)
    return TransformerWrapper(num_tokens=100, max_seq_len=64, attn_layers=layers)


def fno() -> nn.Module:
    from neuralop.models import FNO

    return FNO(n_modes=(8, 8), hidden_channels=8, in_channels=1, out_channels=1, n_layers=2)


def ft_transformer() -> nn.Module:
    from rtdl_revisiting_models import FTTransformer

    return FTTransformer(
        n_cont_features=4,
        cat_cardinalities=[5, 7],
        d_out=2,
        n_blocks=2,
        d_block=16,
        attention_n_heads=4,
        attention_dropout=0.1,
        ffn_d_hidden=None,
        ffn_d_hidden_multiplier=4 / 3,
        ffn_dropout=0.1,
        residual_dropout=0.0,
    )


def efficientnet() -> nn.Module:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0", num_classes=5, image_size=64)


def tabnet() -> nn.Module:
    from pytorch_tabnet.tab_network import TabNet

    return TabNet(
        input_dim=10, output_dim=3, n_d=8, n_a=8, n_steps=2, group_attention_matrix=torch.eye(10)
    )


def lora() -> nn.Module:
    """A fine-tuned network whose adapters were merged before it was saved."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    adapted = get_peft_model(
        BertForSequenceClassification(config), LoraConfig(target_modules=["query", "value"])
    )
    merged: nn.Module = adapted.merge_and_unload()
    return merged


def mel_crnn() -> nn.Module:
    """A mel spectrogram of nnAudio in front of a convolution."""
    from nnAudio.features import MelSpectrogram

    return nn.Sequential(
        MelSpectrogram(sr=8000, n_fft=256, hop_length=128, n_mels=16, verbose=False),
        nn.Conv1d(16, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


class ConvTasNet(nn.Module):
    """Source separation: learned filterbank (asteroid), masks, its inverse."""

    def __init__(self) -> None:
        super().__init__()
        from asteroid_filterbanks import Decoder, Encoder, FreeFB

        self.encode = Encoder(FreeFB(32, 16, stride=8))
        self.decode = Decoder(FreeFB(32, 16, stride=8))
        self.masks = nn.Sequential(nn.Conv1d(32, 64, 1), nn.ReLU(), nn.Conv1d(64, 64, 1))

    def forward(self, wave: Tensor) -> Tensor:
        rows = self.encode(wave)
        masks = self.masks(rows).sigmoid().unflatten(1, (2, 32))
        return self.decode(masks * rows.unsqueeze(1))


def conformer() -> nn.Module:
    from conformer import ConformerBlock

    return ConformerBlock(dim=32, dim_head=8, heads=4, conv_kernel_size=7)


class LiquidNet(nn.Module):
    """Closed-form liquid time constants (ncps)."""

    def __init__(self) -> None:
        super().__init__()
        from ncps.torch import CfC

        self.net = CfC(5, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows, _ = self.net(x)
        return self.head(rows[:, -1])


class MambaPy(nn.Module):
    """State space layers in plain torch (mambapy)."""

    def __init__(self) -> None:
        super().__init__()
        from mambapy.mamba import Mamba, MambaConfig

        self.embed = nn.Embedding(50, 16)
        self.net = Mamba(MambaConfig(d_model=16, n_layers=2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(self.embed(ids))


class Flow(nn.Module):
    """A normalising flow (zuko): the log density of a point."""

    def __init__(self) -> None:
        super().__init__()
        import zuko

        self.flow = zuko.flows.MAF(3, transforms=2, hidden_features=(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.flow().log_prob(x)


class Policy(nn.Module):
    """What stable-baselines3 trained, as its documentation exports it."""

    def __init__(self) -> None:
        super().__init__()
        import gymnasium
        from stable_baselines3.common.policies import ActorCriticPolicy

        box = gymnasium.spaces.Box(-1, 1, (8,))
        self.policy = ActorCriticPolicy(box, gymnasium.spaces.Discrete(4), lambda _: 1e-3)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.policy(observation, deterministic=True)


class Egnn(nn.Module):
    """Equivariant layers over atoms and their positions (egnn-pytorch)."""

    def __init__(self) -> None:
        super().__init__()
        from egnn_pytorch import EGNN

        self.net = EGNN(dim=16)

    def forward(self, atoms: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(atoms, positions)


class Augmented(nn.Module):
    """kornia's operators in front of a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(8, 3)

    def forward(self, image: Tensor) -> Tensor:
        import kornia

        gray = kornia.color.rgb_to_grayscale(kornia.filters.gaussian_blur2d(image, (3, 3), (1, 1)))
        edges = kornia.filters.sobel(gray)
        return self.head(self.net(torch.cat([gray, edges], dim=1)).flatten(1))


class SentenceVectors(nn.Module):
    """A sentence-transformers model, taken apart as its users do for export."""

    def __init__(self) -> None:
        super().__init__()
        from sentence_transformers.models import Pooling
        from transformers import BertConfig, BertModel

        self.bert = BertModel(
            BertConfig(
                vocab_size=100,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
            )
        )
        self.pool = Pooling(32)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        rows = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        pooled = self.pool({"token_embeddings": rows, "attention_mask": attention_mask})
        return F.normalize(pooled["sentence_embedding"], dim=-1)


def perceiver() -> nn.Module:
    from perceiver_pytorch import Perceiver

    return Perceiver(
        input_channels=3,
        input_axis=1,
        num_freq_bands=2,
        max_freq=4.0,
        depth=2,
        num_latents=8,
        latent_dim=16,
        latent_heads=2,
        cross_dim_head=8,
        latent_dim_head=8,
        num_classes=4,
    )


def tab_transformer() -> nn.Module:
    from tab_transformer_pytorch import TabTransformer

    return TabTransformer(
        categories=(5, 7, 4),
        num_continuous=3,
        dim=16,
        depth=2,
        heads=2,
        dim_head=8,
        mlp_act=nn.ReLU(),
    )


def i_transformer() -> nn.Module:
    from iTransformer import iTransformer

    return iTransformer(
        num_variates=5, lookback_len=24, pred_length=8, dim=16, depth=2, heads=2, dim_head=8
    )


def kan() -> nn.Module:
    from kan.KANLayer import KANLayer

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = KANLayer(4, 5, num=3, k=3), KANLayer(5, 1, num=3, k=3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)[0])[0]

    return Net()


def ddpm_unet() -> nn.Module:
    from denoising_diffusion_pytorch import Unet

    return Unet(dim=8, dim_mults=(1, 2), flash_attn=False)


def clip_open() -> nn.Module:
    from open_clip.model import CLIP

    return CLIP(
        embed_dim=16,
        vision_cfg={"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        text_cfg={"context_length": 12, "vocab_size": 100, "width": 32, "heads": 2, "layers": 2},
    )


class NBeatsLike(nn.Module):
    """A forecaster of stacked blocks with backcasts, as N-BEATS."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(3)
        )

    def forward(self, window: Tensor) -> Tensor:
        forecast = window.new_zeros(window.shape[0], 8)
        for block in self.blocks:
            backcast, ahead = block(window).split([24, 8], dim=-1)
            window, forecast = window - backcast, forecast + ahead
        return forecast
