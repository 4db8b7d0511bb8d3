"""Losses of masks beside those of overlaps: at sampled points, of prototypes, and of distances to a boundary."""
