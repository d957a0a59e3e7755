"""The building blocks of every model: attention, feed-forward networks, residual sublayers, blocks and stacks."""
