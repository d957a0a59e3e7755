"""Communication between the processes that train or run one model."""
