"""The parts that every model is made of."""
