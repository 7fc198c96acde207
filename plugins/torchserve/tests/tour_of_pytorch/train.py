"""Train the classifier for a few steps, and save it as TorchScript.

Writes `checkpoints/`, and what the next steps look at: `images/0.png`, a zero; `inputs.f32` and
`answers.f32`, eight inputs with the answers that every runtime must give.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from net import CNN
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def load_data() -> TensorDataset:
    """Return scans of digits as pictures of 28 x 28 with values from 0 to 1, and their labels."""
    scans = [Image.open(f"scans/{digit}.png") for digit in range(10)]
    pixels = torch.tensor([list(scan.getdata()) for scan in scans]).reshape(-1, 1, 8, 8) / 255
    images = F.interpolate(pixels, size=(28, 28)).repeat(16, 1, 1, 1)
    return TensorDataset(images, torch.arange(10).repeat(16))


def save(classifier: nn.Module, network: nn.Module, images: Tensor) -> None:
    """Save the network of a trained classifier, and what it answers."""
    Path("checkpoints").mkdir(exist_ok=True)
    torch.jit.script(network.eval()).save("checkpoints/jit_model.pt")
    jit_cnn = torch.jit.load("checkpoints/jit_model.pt")

    Path("images").mkdir(exist_ok=True)
    zero = (images[0, 0].numpy() * 255).astype(np.uint8)
    Image.fromarray(zero).save("images/0.png")
    with torch.no_grad():
        answers = classifier.eval()(images[:8])
        assert torch.equal(jit_cnn(images[:8]), answers)
    images[:8].numpy().tofile("inputs.f32")
    answers.numpy().tofile("answers.f32")


def main() -> None:
    """Train with plain PyTorch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = load_data()
    model = CNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    for _, (x, y) in zip(range(4), DataLoader(data, batch_size=16, shuffle=True), strict=False):
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "cnn.pt")
    save(model, model.cnn, data.tensors[0])


if __name__ == "__main__":
    main()
