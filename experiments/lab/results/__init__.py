"""Results: what evaluate.py and predict.py do, runs as pandas frames, and the final table."""
