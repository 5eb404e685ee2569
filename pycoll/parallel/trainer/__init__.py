"""The training step: trainer, optimizers, update policy, checkpoints."""
