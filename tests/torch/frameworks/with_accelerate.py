"""accelerate trains with the backend by name: torchrun with_accelerate.py BACKEND."""

from __future__ import annotations

import sys

import one_model
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

# Where there is no GPU, accelerate starts no backend but Gloo and MPI; it takes what is there.
dist.init_process_group(sys.argv[1])
accelerator = Accelerator(cpu=True)
assert dist.get_backend() == sys.argv[1]
model = one_model.make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=one_model.LEARNING_RATE)
# accelerate deals whole batches out in turn: n of them are one of the single process.
loader = DataLoader(one_model.make_data(), one_model.BATCH // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    steps += 1
assert steps == one_model.STEPS
gathered = accelerator.gather(torch.tensor([accelerator.process_index]))
assert gathered.tolist() == list(range(accelerator.num_processes))
off = one_model.largest_difference(accelerator.unwrap_model(model), one_model.train_alone())
accelerator.print(f"accelerate: {steps} steps, {off:.2e} off one process")
assert off < 1e-12
accelerator.end_training()
