"""What happens inside a deep model: gradients, updates and their change over depth."""
