"""Lightning modules as their users write them, one for each thing that Lightning adds."""

from typing import Any, cast

import lightning
import torch
import torchmetrics
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


class Base(lightning.LightningModule):
    """What the modules below share: a network over eight numbers, and a step of training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, target = batch
        return functional.cross_entropy(self(x), target)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Plain(Base):
    pass


class Logs(Base):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"double": loss * 2, "lr": 0.1})
        return loss


class Manual(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Metrics(Base):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.others = torchmetrics.MetricCollection(
            {"f1": torchmetrics.F1Score(task="multiclass", num_classes=3)}
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, target = batch
        logits = self(x)
        self.accuracy(logits, target)
        self.others(logits, target)
        self.log("accuracy", self.accuracy)
        return functional.cross_entropy(logits, target)


class TrainerInHooks(Base):
    def on_train_epoch_end(self) -> None:
        assert self.trainer.current_epoch == self.current_epoch

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule}}


class TrainerInProperty(Base):
    @property
    def steps_left(self) -> int:
        return int(self.trainer.estimated_stepping_batches) - self.global_step


class ExampleInput(Base):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 8)


class HyperParameters(Base):
    def __init__(self, hidden: int, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = super().forward(x) * self.hparams["scale"]
        return scaled


class Nested(lightning.LightningModule):
    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, x: Tensor) -> Tensor:
        decoded: Tensor = self.decoder(self.encoder(x))
        return decoded

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return functional.mse_loss(self(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def autoencoder() -> Nested:
    return Nested(nn.Sequential(nn.Linear(8, 3), nn.Tanh()), nn.Linear(3, 8))


class LightningInside(Base):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Metrics()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(self.backbone(x))
        return logits


class Averaged(Base):
    """Trained with a callback that averages its weights."""


class Compiled(Base):
    def __init__(self) -> None:
        super().__init__()
        # The backend that needs no compiler of C++.
        self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]


class MixedPrecision(Base):
    pass


class FromCommandLine(Base):
    def __init__(self, hidden: int = 4, activation: str = "relu") -> None:
        super().__init__()
        self.save_hyperparameters()
        act = {"relu": nn.ReLU(), "tanh": nn.Tanh()}[activation]
        self.net = nn.Sequential(nn.Linear(8, hidden), act, nn.Linear(hidden, 3))


class WithFabric(Base):
    pass


class TwoInputs(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(5, 4)

    def forward(self, x: Tensor, extra: Tensor) -> dict[str, Tensor]:
        both = torch.relu(self.left(x) + self.right(extra))
        return {"features": both, "score": both.sum(1)}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, _ = batch
        outputs: dict[str, Tensor] = self(x, x[:, :5])
        return outputs["score"].square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class TorchsOwnNames(Base):
    """Calls its parts as torch's GraphModule calls what it has itself."""

    def __init__(self) -> None:
        super().__init__()
        self.meta = nn.Sequential(nn.Linear(8, 6), nn.ReLU())
        self.graph = nn.Linear(6, 5)
        self.code = nn.LayerNorm(5)
        self.net = nn.Sequential(nn.Linear(5, 3))
        self.register_buffer("print_readable", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(self.code(self.graph(self.meta(x))))
        return logits


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.device = nn.Linear(8, 4)
        self.training_type = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.training_type(self.device(x))
        return logits


class LightningsOwnNames(Base):
    """Calls its parts, and what it notes, as older releases of Lightning do."""

    def __init__(self) -> None:
        super().__init__()
        self.training_type = "supervised"
        self.net = _Head()  # type: ignore[assignment]


class Gan(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 6), nn.LeakyReLU(0.2), nn.Linear(6, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1))

    def forward(self, z: Tensor) -> Tensor:
        generated: Tensor = self.generator(z)
        return generated

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        first, second = cast("list[LightningOptimizer]", self.optimizers())
        self.toggle_optimizer(first)
        loss = self.discriminator(self(batch[0])).mean()
        self.manual_backward(-loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = self.discriminator(self(batch[0]).detach()).square().mean()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters()),
            torch.optim.Adam(self.discriminator.parameters()),
        ]


class Branches(Base):
    """Takes another way where the values are large, which only a script keeps."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        if bool(logits.abs().max() > 0.5):
            logits = logits.log_softmax(dim=1)
        return logits


class Recurrent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(2, 4, batch_first=True)
        self.net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.cells(x.view(-1, 4, 2))[0][:, -1]
        logits: Tensor = self.net(last)
        return logits


class LossWithWeights(Base):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
        for weight in self.net[0].parameters():
            weight.requires_grad = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, target = batch
        loss: Tensor = self.criterion(self(x), target)
        return loss
