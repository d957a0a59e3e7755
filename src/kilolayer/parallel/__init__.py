"""What models need of several processes."""
