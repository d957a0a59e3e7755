"""Files: the one place that opens what a run, a cache or a stranger left, and the one that writes."""
