"""The training loop and its parts: optimizer, schedule, non-finite guard, checkpoints and metrics."""
