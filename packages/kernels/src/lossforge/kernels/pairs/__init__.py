"""Losses over a matrix of similarities."""
