"""Data: each source by one record, its samples, splits and batches."""
