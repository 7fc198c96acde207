"""Train the classifier with Lightning, and save its best checkpoint as `train.py` saves its own."""

from pathlib import Path

import torch
from lightning_net import CNNModel
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from train import load_data, save

seed_everything(0)
torch.set_num_threads(1)
data = load_data()
trainer = Trainer(
    callbacks=[ModelCheckpoint(dirpath="checkpoints")],
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(CNNModel(), DataLoader(data, batch_size=16, shuffle=True))
best_ckpt = trainer.checkpoint_callback.best_model_path
Path(best_ckpt).rename("checkpoints/best.ckpt")

best_cnn = CNNModel.load_from_checkpoint("checkpoints/best.ckpt").eval()
save(best_cnn, best_cnn.cnn, data.tensors[0])
