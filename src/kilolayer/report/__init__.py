"""Reports: plots of runs, comparisons, diagnoses and loss surfaces, and the self-contained HTML pages that show them."""
