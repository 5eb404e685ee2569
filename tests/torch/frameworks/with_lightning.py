"""Lightning trains with the backend by name: torchrun with_lightning.py BACKEND."""

from __future__ import annotations

import os
import sys

import one_model
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = one_model.make_model()

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=one_model.LEARNING_RATE)

    def on_train_start(self):
        assert dist.get_backend() == sys.argv[1]


module = Module()
trainer = Trainer(
    accelerator="cpu",
    devices=NUM_RANKS,
    strategy=DDPStrategy(process_group_backend=sys.argv[1]),
    max_epochs=1,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
sampler = one_model.InStrides(RANK, NUM_RANKS)
batch_size = one_model.BATCH // NUM_RANKS
trainer.fit(module, DataLoader(one_model.make_data(), batch_size, sampler=sampler))
assert trainer.global_step == one_model.STEPS
off = one_model.largest_difference(module.model, one_model.train_alone())
if RANK == 0:
    print(f"lightning: {trainer.global_step} steps, {off:.2e} off one process")
assert off < 1e-12
dist.destroy_process_group()
