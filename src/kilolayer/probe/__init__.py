"""Measurements inside a deep model: gradients, updates and states by layer, loss surfaces, and a diagnosis from them."""
