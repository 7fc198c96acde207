"""Train both classifiers for a few steps, and save the better one as TorchScript.

Writes `checkpoints/`, and what the next steps look at: `images/0.png`, a zero; `inputs.f32` and
`answers.f32`, eight inputs with the answers that every runtime must give.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from net import CNN, CNNModel
from PIL import Image
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

seed_everything(0)
torch.set_num_threads(1)
scans, labels = (part[:160] for part in load_digits(return_X_y=True))  # 8 x 8, values 0 to 16
pixels = torch.from_numpy(scans).float().reshape(-1, 1, 8, 8) / 16
images = F.interpolate(pixels, size=(28, 28))
data = TensorDataset(images, torch.from_numpy(labels))
loader = DataLoader(data, batch_size=16, shuffle=True)

# Plain PyTorch
model = CNN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
for _, (x, y) in zip(range(4), loader, strict=False):
    optimizer.zero_grad()
    loss = F.nll_loss(model(x), y)
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "cnn.pt")

# Lightning
trainer = Trainer(
    callbacks=[ModelCheckpoint(dirpath="checkpoints")],
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(CNNModel(), loader)
best_ckpt = trainer.checkpoint_callback.best_model_path
Path(best_ckpt).rename("checkpoints/best.ckpt")

best_cnn = CNNModel.load_from_checkpoint("checkpoints/best.ckpt").eval()
torch.jit.script(best_cnn.cnn).save("checkpoints/jit_model.pt")
jit_cnn = torch.jit.load("checkpoints/jit_model.pt")

Path("images").mkdir(exist_ok=True)
zero = (images[0, 0].numpy() * 255).astype(np.uint8)
Image.fromarray(zero).save("images/0.png")
with torch.no_grad():
    answers = best_cnn(images[:8])
    assert torch.equal(jit_cnn(images[:8]), answers)
images[:8].numpy().tofile("inputs.f32")
answers.numpy().tofile("answers.f32")
