"""The training loop and what it keeps: optimizer, schedule, guard, checkpoints, metrics."""
