"""A task binds data, model, loss and score."""
